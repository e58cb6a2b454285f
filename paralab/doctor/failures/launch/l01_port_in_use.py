"""L01: the port is in use."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.report import found
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import arrives, ways_to

ENTRY = Entry(
    id="L01",
    title="The port is in use",
    symptom="'The server socket has failed to listen … EADDRINUSE … address already in use'.",
    cause="Another job, a leftover process, or another rank of this job listens on the same port.",
    fix="End the other job or use another port; `torchrun --standalone` finds a free one. Let only one rank host a store.",
    example="""\
- os.environ["MASTER_PORT"] = "29500"
+ os.environ["MASTER_PORT"] = str(port_that_is_free)
  dist.init_process_group("gloo", rank=rank, world_size=2)
""",
    sources=(
        "pytorch/pytorch#126510",
        "pytorch/pytorch#85604",
        "meta-pytorch/torchtune#392",
        "meta-pytorch/torchtune#1025",
        "vllm-project/vllm#39015",
    ),
    limits="A script does not show which ports are free, only ranks that compete for one.",
    messages=(
        Message(
            r"(?:server socket has failed to listen.{0,160}?)?(?:port: |\]:|\d:)(?P<port>\d{4,5})\b.{0,160}?"
            r"(?:EADDRINUSE|ddress already in use)"
            r"|server socket has failed to listen.{0,160}?(?:EADDRINUSE|ddress already in use)",
            "The port {port} is already in use on this host, by another job or by a process that an "
            "earlier job left behind.",
            fix="Use torchrun --standalone, which takes a free port. `ss -ltnp` shows which process uses this one.",
            kind="printed",
        ),
        Message(
            r"EADDRINUSE|ddress already in use",
            "The port that {who} wants to listen on{at} is already in use.",
            fix="Use torchrun --standalone, which takes a free port. `ss -ltnp` shows which process uses this one.",
        ),
    ),
)


@check("L01", source="script")
def every_rank_serves(script: Script) -> Iterator[Finding]:
    """Suspect a TCPStore that every rank tries to host on one port."""
    for store in script.calls_of("torch.distributed.TCPStore"):
        port, serves = store.argument(1, "port"), store.argument(3, "is_master")
        shared = store.argument(99, "multi_tenant")
        if port is None or serves is None or store.unpacks:
            continue
        if shared is not None and script.truth(shared, store.scope, 1) is not False:
            continue
        number = script.evaluate(port, store.scope, 1)
        if not isinstance(number, int) or not number:
            continue
        if not all(script.truth(serves, store.scope, rank) for rank in (0, 1)):
            continue
        if not any(arrives(script, way, 1).taken for way in ways_to(script, store)):
            continue
        why = (
            f"Every rank listens on port {number} (`is_master=True`). The first rank of a machine gets it, the others "
            "fail with EADDRINUSE. Certain if several ranks run on one machine."
        )
        yield found(script, "L01", "suspect", store, why, "Pass `is_master=(rank == 0)`.")


@check("L01", source="machine")
def port_taken(facts: Facts) -> Iterator[Finding]:
    """Report a MASTER_PORT that another process uses."""
    port = facts.port
    # torchrun hosts its own store there. Ranks other than 0 use a remote port, or rank 0's.
    if port is None or port.free or facts.launch.by == "torchrun" or (facts.launch.rank or 0) > 0:
        return
    owner = "another user's process"
    end = ""
    if port.owner_pid is not None:
        owner = f"process {port.owner_pid} ({port.owner or 'command unknown'})"
        end = f" Or end that process: kill {port.owner_pid}."
    fix = f"Use another port (export MASTER_PORT={port.number + 1}), or torchrun --standalone, which finds a free one.{end}"
    evidence = facts.evidence("port")
    if port.asked:
        why = f"MASTER_PORT={port.number} is taken by {owner}: rank 0 cannot listen there and fails with EADDRINUSE."
        yield Finding("L01", "error", why, fix, evidence=evidence)
    else:
        why = f"The usual port {port.number} is taken by {owner}. Certain if your script or launcher uses that port."
        yield Finding("L01", "suspect", why, fix, evidence=evidence)
