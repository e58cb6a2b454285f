"""Will the ranks find each other? Launcher, port, address, names, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding, Severity
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import check
from paralab.doctor.surroundings import is_loopback
from paralab.units import seconds

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what init_process_group reads


@check("H18", source="machine")
def no_meeting(facts: Facts) -> Iterator[Finding]:
    address, launch = facts.address, facts.launch
    if address and address.resolved is None:
        why = (
            f"MASTER_ADDR={address.name} does not resolve ({address.problem}): no rank can find rank 0, and all wait for their "
            "timeout."
        )
        fix = "The address of the first node as a number, e.g. from `hostname -I` there, or `scontrol show node NAME`."
        yield Finding("H18", "error", why, fix, evidence=facts.seen("MASTER_ADDR"))
    several = (launch.nodes or 1) > 1 or bool(
        launch.ranks and launch.local_ranks and launch.ranks > launch.local_ranks
    )
    if address and several and is_loopback(address.name):
        why = f"MASTER_ADDR={address.name} is every machine's own, and this job is on several: each node would wait for itself."
        yield Finding(
            "H18",
            "error",
            why,
            "MASTER_ADDR = the first node's address, the same on all.",
            evidence=facts.seen("MASTER_ADDR"),
        )
    if address and address.connects is False:
        why = (
            f"Rank {launch.rank} cannot connect to {address.name}:{launch.variables.get('MASTER_PORT')} ({address.problem}). "
            "Certain if rank 0 "
            "is running: then a firewall, another port, or another address."
        )
        yield Finding(
            "H18",
            "suspect",
            why,
            "Start rank 0; the same MASTER_ADDR and MASTER_PORT on all nodes.",
            evidence=facts.seen("MASTER_ADDR"),
        )
    tasks = facts.environment.get("SLURM_STEP_NUM_TASKS", "")
    if (
        tasks.isdigit()
        and int(tasks) > 1
        and launch.by != "torchrun"
        and launch.variables.get("WORLD_SIZE", tasks) != tasks
    ):
        size_ = launch.variables["WORLD_SIZE"]
        why = f"WORLD_SIZE={size_}, but Slurm has started {tasks} tasks: the ranks wait for {size_} to come, and never meet."
        yield Finding(
            "H18",
            "error",
            why,
            "export WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID in every task.",
            evidence=facts.seen("launcher"),
        )


@check("H18", source="machine")
def no_own_name(facts: Facts) -> Iterator[Finding]:
    if facts.host and facts.host_address is None:
        why = (
            f"This machine's own name, {facts.host}, does not resolve. gloo and torchrun ask for it where no interface is named, "
            "and then "
            "wait or fail. Certain if a job on this machine says 'Unable to resolve hostname'."
        )
        fix = f"A line `127.0.1.1 {facts.host}` in /etc/hosts; or GLOO_SOCKET_IFNAME=lo and torchrun --rdzv-endpoint=127.0.0.1:0."
        yield Finding("H18", "suspect", why, fix, evidence=facts.seen("host name"))


@check("H19", source="machine")
def debugging_that_crashes(facts: Facts) -> Iterator[Finding]:
    if facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() != "DETAIL":
        return
    fix = (
        "export TORCH_DISTRIBUTED_DEBUG=INFO. The order of collectives is in the flight recorder: `paralab doctor -- COMMAND` "
        "reads it."
    )
    known = facts.torch is not None and facts.torch.version.startswith(("2.12", "2.13"))
    version = f"torch {facts.torch.version}" if facts.torch else "this torch"
    why = (
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL: with gloo, DistributedDataParallel of {version} dies of it (SIGSEGV), also in a sound "
        "script."
    )
    certain: Severity = "error" if known and not facts.gpus else "suspect"
    doubt = (
        "" if certain == "error" else " Certain if your backend is gloo and torch is 2.12 or 2.13."
    )
    yield Finding("H19", certain, why + doubt, fix, evidence=facts.seen("TORCH_DISTRIBUTED_DEBUG"))


@check("H15", source="machine")
def gpus_that_do_not_reach_each_other(facts: Facts) -> Iterator[Finding]:
    for pair in facts.pairs:
        first, second = pair.direct.ranks
        row = f"GPU pair {first}-{second}"
        if (
            pair.direct.seconds is None
            and pair.through_host
            and pair.through_host.seconds is not None
        ):
            why = (
                f"{first} and {second} do not come through an all-reduce ({pair.direct.problem}), and do with NCCL_P2P_DISABLE=1 "
                f"({seconds(pair.through_host.seconds)}): the direct way between them is broken."
            )
            fix = (
                "PCIe ACS off (or iommu=pt) on this machine; until then export NCCL_P2P_DISABLE=1."
            )
            yield Finding("H15", "error", why, fix, evidence=facts.seen(row))
        elif pair.direct.seconds is None:
            why = f"{first} and {second} do not come through an all-reduce, with NCCL_P2P_DISABLE=1 neither: {pair.direct.problem}."
            fix = (
                "NCCL_DEBUG=INFO shows where it stops; driver, NCCL and torch may not fit together."
            )
            yield Finding(
                "H15",
                "suspect",
                f"{why} Certain if it is so on idle GPUs.",
                fix,
                evidence=facts.seen(row),
            )
