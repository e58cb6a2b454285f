"""L01: The port is in use.

Symptom: 'The server socket has failed to listen … EADDRINUSE … address already in use'.
Cause: Another job, a leftover process, or another rank of this job listens on the same port.
Fix: Stop the other job or use another port; `torchrun --standalone` finds a free one. Let only one rank host a store.
Limits: A script does not show which ports are free, only whether its ranks compete for one.
Reported: pytorch/pytorch#126510 #85604 meta-pytorch/torchtune#392 #1025 vllm-project/vllm#39015

- os.environ["MASTER_PORT"] = "29500"
+ os.environ["MASTER_PORT"] = str(port_that_is_free)
  dist.init_process_group("gloo", rank=rank, world_size=2)
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, Message, check, describe, printed
from paralab.doctor.static.report import found
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import arrives, ways_to

FREE_PORT = (
    "Use torchrun --standalone, which finds a free port. `ss -ltnp` shows which process uses this "
    "one."
)
ENTRY = describe(
    __doc__,
    printed(
        r"(?:server socket has failed to listen.{0,160}?)?(?:port: |\]:|\d:)(?P<port>\d{4,5})\b.{0,160}?"
        r"(?:EADDRINUSE|ddress already in use)"
        r"|server socket has failed to listen.{0,160}?(?:EADDRINUSE|ddress already in use)",
        "Port {port} is already in use on this host, by another job or by a process left over "
        "from an earlier one.",
        fix=FREE_PORT,
    ),
    Message(
        r"EADDRINUSE|ddress already in use",
        "The port that {who} wants to listen on{at} is already in use.",
        fix=FREE_PORT,
    ),
)


@check("L01", source="script")
def every_rank_serves(script: Script) -> Findings:
    """Flag a TCPStore that every rank tries to host on one port."""
    for store in script.calls_of("torch.distributed.TCPStore"):
        port, serves = store.argument(1, "port"), store.argument(3, "is_master")
        shared = store.argument(99, "multi_tenant")
        if port is None or serves is None or store.unpacks:
            continue
        if shared is not None and script.truth(shared, store.scope, 1) is not False:
            continue
        number = script.evaluate(port, store.scope, 1)
        every = all(script.truth(serves, store.scope, rank) for rank in (0, 1))
        reached = any(arrives(script, way, 1).taken for way in ways_to(script, store))
        if every and reached and isinstance(number, int) and number:
            why = (
                f"Every rank listens on port {number} (`is_master=True`). The first rank on a "
                "machine gets it, and the others fail with EADDRINUSE."
            )
            fix, doubt = "Pass `is_master=(rank == 0)`.", "if multiple ranks run on one machine"
            yield found(script, "L01", "suspect", store, why, fix, doubt=doubt)


@check("L01", source="machine")
def port_taken(facts: Facts) -> Findings:
    port = facts.port
    # torchrun hosts its own store on this port. Ranks other than 0 only connect to rank 0's port.
    if port is None or port.free or facts.launch.by == "torchrun" or (facts.launch.rank or 0) > 0:
        return
    owner = "Another user's process"
    end = ""
    if port.owner_pid is not None:
        owner = f"Process {port.owner_pid} ({port.owner or 'command unknown'})"
        end = f" Or stop that process: kill {port.owner_pid}."
    fix = f"Use another port (export MASTER_PORT={port.number + 1}), or torchrun --standalone, which finds a free one.{end}"
    why = f"{owner} listens on port {port.number}, so rank 0 cannot, and fails with EADDRINUSE."
    doubt = "" if port.asked else "if your script or launcher uses that port (the usual default)"
    yield make_finding("L01", "error", why, None, facts.evidence("port"), fix=fix, doubt=doubt)
