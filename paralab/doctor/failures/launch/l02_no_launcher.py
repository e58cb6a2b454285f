"""L02: The script was started without a launcher.

Symptom: 'environment variable RANK expected, but not set'.
Cause: init_process_group reads RANK and WORLD_SIZE from the environment; torchrun sets them, python does not.
Fix: Start the script with torchrun.

- subprocess.run(["python", "train.py"])
+ subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Finding, Findings, Message, check, describe

ENTRY = describe(
    __doc__,
    Message(
        r"Error initializing torch\.distributed using env:// rendezvous: environment variable "
        r"(?P<name>\w+) expected, but not set",
        "init_process_group{at} reads {name} from the environment, but it is not set: the script "
        "was started with plain python.",
    ),
)


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what init_process_group reads


@check("L02", source="machine")
def incomplete_launch(facts: Facts) -> Findings:
    launch, evidence = facts.launch, facts.evidence("launcher")
    given = sorted({"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(launch.variables))
    missing = [name for name in NEEDED if name not in launch.variables]
    if given and missing and launch.ranks != 1:
        are = "is" if len(given) == 1 else "are"
        why = f"{' and '.join(given)} {are} set, but not {' and '.join(missing)}, so init_process_group raises."
        fix = "Start with torchrun, which sets all of them, or unset variables left over from another job."
        yield Finding("L02", "error", why, fix, evidence=evidence)
    rank, ranks = launch.rank, launch.ranks if "WORLD_SIZE" in launch.variables else None
    if rank is not None and ranks is not None and rank >= ranks:
        why = f"RANK={rank} is out of range for WORLD_SIZE={ranks}: ranks go from 0 to {ranks - 1}."
        fix = "Number the processes from 0, each with its own RANK."
        yield Finding("L02", "error", why, fix, evidence=evidence)
