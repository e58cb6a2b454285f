"""H13: Rank 0 prepares data for longer than the other ranks wait.

Symptom: 'Socket Timeout' while fetching the NCCL id from the store, or a timeout in the first barrier.
Cause: The other ranks wait in a barrier with the default timeout while rank 0 downloads or tokenizes.
Fix: Prepare the data before starting the job, or pass a long enough `timeout` to init_process_group.
Reported: JIA-Lab-research/LongLoRA#45 hiyouga/LlamaFactory#2424 NVIDIA/nccl#865
huggingface/accelerate#2528 huggingface/transformers#17106

- dist.init_process_group("nccl")
+ dist.init_process_group("nccl", timeout=timedelta(hours=3))
  if dist.get_rank() == 0:
      download("https://example.org/corpus")
  dist.barrier()
"""

from paralab.doctor.registry import Findings, check, describe, printed
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import COLLECTIVES, INIT
from paralab.doctor.static.project import position
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

FIRST_COLLECTIVE = (
    r"\[(?P<waiting>\d+)\] is setting up NCCL communicator and retr(?:ie|ei)ving ncclUniqueId from "
    r"\[(?P<other>\d+)\] via c10d key-value store by key '[^']*', but (?:store->get|got error)"
)
ENTRY = describe(
    __doc__,
    printed(
        FIRST_COLLECTIVE,
        "Rank {waiting} waited in its first collective until the timeout, and rank {other} never arrived. "
        "The launcher stopped a rank that was still running. If that was rank {other}, it was "
        "still preparing data, or it never calls this collective (H03).",
        severity="suspect",
        blames=False,
        beside=r"closing signal SIGTERM",
    ),
)


LONG = (
    "tokenize preprocess prepare_data build_index build_cache build_vocab snapshot_download "
    "load_dataset download"
).split()


@check("H13", source="script")
def waits_for_preparation(script: Script) -> Findings:
    """Report a barrier with the default timeout that all ranks reach after rank 0 prepares data."""
    starts = script.calls_of(INIT)
    if not starts or any(call.argument(99, "timeout") or call.unpacks for call in starts):
        return
    for barrier in script.calls_of("torch.distributed.barrier"):
        before = [
            call
            for call in script.calls_in(barrier.scope)
            if position(call.node) < position(barrier.node) and not barrier.inside(If)
        ]
        long = next((call for call in reversed(before) if _prepares(script, call)), None)
        if long is None or any(
            call.method in COLLECTIVES for call in before[before.index(long) + 1 :]
        ):
            continue
        why = (
            f"The other ranks wait here while rank 0 runs `{code(long.node.func)}` ({line_of(long, barrier)}), "
            "and init_process_group uses the default timeout."
        )
        doubt = (
            "if that takes longer than 10 minutes (nccl) or 30 minutes (gloo) with the real data"
        )
        yield found(script, "H13", "suspect", barrier, why, doubt=doubt, also=(long,))
        return


def _prepares(script: Script, call: Call) -> bool:
    if not call.method.startswith(tuple(LONG)):
        return False
    tests = [one for one in call.inside(If) if one.taken and not one.exits]
    return any(
        script.truth(one.test, call.scope, 0) and script.truth(one.test, call.scope, 1) is False
        for one in tests
    )
