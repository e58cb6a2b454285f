"""L01: The port is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.agreement import found
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, Message, check

TAKEN = re.compile(r"EADDRINUSE|ddress already in use")
PORT = re.compile(r"port: (\d+)|:(\d{4,5})\b")

ENTRY = Entry(
    id="L01",
    title="The port is taken",
    symptom="'The server socket has failed to listen … EADDRINUSE … address already in use'.",
    cause="Another job, what is left of the last one, or another rank of this one listens on the same port.",
    fix="End the other job, or take another port; `torchrun --standalone` finds a free one. One rank alone serves a store.",
    wrong="""\
os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("gloo", rank=rank, world_size=2)
""",
    right="""\
os.environ["MASTER_PORT"] = str(port_that_is_free)
dist.init_process_group("gloo", rank=rank, world_size=2)
""",
    sources=(
        "pytorch/pytorch#126510",
        "pytorch/pytorch#85604",
        "meta-pytorch/torchtune#392",
        "meta-pytorch/torchtune#1025",
        "vllm-project/vllm#39015",
    ),
    limits="Whether a port is free is known when it runs: in the script, only ranks against each other are seen.",
    messages=(
        Message(
            r"(?:port: |\]:|\d:)(?P<port>\d{4,5})\b.{0,160}?(?:EADDRINUSE|ddress already in use)"
            r"|server socket has failed to listen.{0,160}?(?:EADDRINUSE|ddress already in use)",
            "The port {port} is already in use on this host, by another job or by a process that an "
            "earlier job left behind.",
            fix="Use torchrun --standalone, which takes a free port. `ss -ltnp` shows who uses this one.",
            kind="printed",
        ),
        Message(
            r"EADDRINUSE|ddress already in use",
            "The port that {who} wants to listen on{at} is already in use.",
            fix="Use torchrun --standalone, which takes a free port. `ss -ltnp` shows who uses this one.",
        ),
    ),
)


@check("L01", source="ranks")
def port_in_use(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        raised = rank.raised
        if raised is None or not TAKEN.search(raised.message):
            continue
        number = PORT.search(raised.message)
        port = f"port {number[1] or number[2]}" if number else "this port"
        yield found(
            "L01",
            "error",
            f"rank {rank.rank} cannot listen on {port}: it is in use by another rank, another job, "
            "or a process that an earlier job left behind",
            "let only one rank start the server. torchrun --standalone picks a free port, and "
            "`ss -ltnp` shows which process uses this one",
            raised.place,
            [f"rank {rank.rank}: {raised.type}: {raised.message.splitlines()[0][:160]}"],
        )
        return
