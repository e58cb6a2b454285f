"""Ranks at their beginning: fewer than are waited for, a port that is taken, and debugging that
kills them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of
from paralab.doctor.events import Init, Wrap
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check
from paralab.units import plural

LATE = re.compile(
    r"clients joined|wait timeout after|client socket has timed out|timed out after", re.IGNORECASE
)
TAKEN = re.compile(r"EADDRINUSE|ddress already in use")
PORT = re.compile(r"port: (\d+)|:(\d{4,5})\b")


@check("H18", source="ranks")
def too_few_came(seen: Observation) -> Iterator[Finding]:
    """init_process_group waits for more ranks than there are."""
    meetings = [
        (rank, next((init for init in _inits(rank) if init.world), None)) for rank in seen.ranks
    ]
    came = [rank.rank for rank, init in meetings if init is not None]
    for rank, init in meetings:
        if (
            init is None
            or not init.world
            or init.world <= len(came)
            or not init.error
            or not LATE.search(init.error)
        ):
            continue
        absent = [number for number in range(init.world) if number not in came]
        named = (
            f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent[:8]))}"
        )
        yield found(
            "H18",
            "error",
            f"init_process_group waits for {init.world} ranks and only {len(came)} came ({named} never did), so those that are "
            "there fail at their timeout; none of them is to blame",
            f"start {init.world} ranks, or give world_size={len(came)}: with torchrun leave rank and world_size out, it knows them",
            place_of(init),
            [
                f"rank {rank.rank}: {init.error.splitlines()[0][:160]}",
                f"came: {', '.join(map(str, came))}",
            ],
        )
        return


@check("H18", source="ranks")
def met_elsewhere(seen: Observation) -> Iterator[Finding]:
    """Under torchrun no rank opens a meeting: its agent keeps one. Where the program names another,
    nobody is there."""
    inits = [(rank, init) for rank in seen.ranks for init in _inits(rank)]
    waiting = [
        (rank, init)
        for rank, init in inits
        if init in rank.doing or (init.error and LATE.search(init.error))
    ]
    elsewhere = [
        (rank, init)
        for rank, init in waiting
        if init.agent and init.address and _port(init.address) != _port(init.agent)
    ]
    if not seen.settled or not elsewhere or len(waiting) < len(inits):
        return
    _, init = elsewhere[0]
    yield found(
        "H18",
        "error",
        f"torchrun keeps the meeting at {init.agent}, and the program has set MASTER_ADDR and MASTER_PORT to {init.address}, where "
        "nobody listens: under torchrun no rank opens a meeting of its own, so all of them wait there",
        "leave MASTER_ADDR and MASTER_PORT as torchrun sets them, or give the port to it: torchrun --master_port=…; where the "
        "script is also started otherwise: os.environ.setdefault",
        place_of(init),
        [f"rank {rank.rank}: waits for {other.address}" for rank, other in elsewhere],
    )


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _inits(rank: RankSeen) -> list[Init]:
    return [event for event in (*rank.events, *rank.doing) if isinstance(event, Init)]


@check("L01", source="ranks")
def port_is_taken(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        raised = rank.raised
        if raised is None or not TAKEN.search(raised.message):
            continue
        number = PORT.search(raised.message)
        port = f"port {number[1] or number[2]}" if number else "this port"
        yield found(
            "L01",
            "error",
            f"rank {rank.rank} wants to listen on {port}, and somebody else does already: another rank of this job, another job, "
            "or what an earlier one has left behind",
            "let one rank of the job be the server; torchrun --standalone finds a free port, and `ss -ltnp` names who holds "
            "this one",
            raised.place,
            [f"rank {rank.rank}: {raised.type}: {raised.message.splitlines()[0][:160]}"],
        )
        return


@check("H19", source="ranks")
def killed_by_debugging(seen: Observation) -> Iterator[Finding]:
    """The process is gone, and what it did last was to wrap a model, with the checks of DETAIL."""
    if not seen.over or seen.ended_by_us:
        return
    gone = [(rank, wrap) for rank in seen.ranks if (wrap := _died_wrapping(rank)) is not None]
    if not gone:
        return
    rank, wrap = gone[0]
    yield found(
        "H19",
        "error",
        f"{plural(len(gone), 'rank')} of {len(seen.ranks)} died without a word while DDP wrapped the model, with "
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL: its checks crash torch {rank.start.torch} itself on gloo (SIGSEGV)",
        "INFO in place of DETAIL; the order of collectives is what this observation compares, too",
        place_of(wrap),
        [
            f"rank {one.rank}: process {one.start.pid} is gone inside DistributedDataParallel(…)"
            for one, _ in gone
        ],
    )


def _died_wrapping(rank: RankSeen) -> Wrap | None:
    inner = rank.doing[-1] if rank.doing else None
    if (
        rank.lives is not False
        or rank.came_to_its_end
        or rank.raised
        or not isinstance(inner, Wrap)
        or inner.kind != "ddp"
    ):
        return None
    return inner if inner.options.get("debug") == "DETAIL" else None
