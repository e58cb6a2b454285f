"""Prove on CPU ranks how layers, sequences, or experts can be split."""

from collections.abc import Mapping

import msgspec

from paralab.errors import ParalabError, UsageError
from paralab.launch.questions import ask
from paralab.machine.host import loopback
from paralab.machine.signals import describe_exit
from paralab.workload.expert_plan import ExpertPlan
from paralab.workload.sequence_plan import SequencePlan
from paralab.workload.tensor_group import TensorPlan

DEADLINE_SECONDS = 1800


SplitPlan = TensorPlan | SequencePlan | ExpertPlan
PLANS: Mapping[str, type[SplitPlan]] = {
    "tensor": TensorPlan,
    "token": TensorPlan,  # with blocks that also split the tokens
    "sequence": SequencePlan,
    "expert": ExpertPlan,
}


def prove_plan(what: str, workload: str, shards: int) -> SplitPlan:
    """Prove on `shards` ranks which parts of the workload's model can be split."""
    question = {"what": what, "workload": workload, "shards": shards}
    near = {"GLOO_SOCKET_IFNAME": interface} if (interface := loopback()) else {}
    ranks = [{**near, "OMP_NUM_THREADS": "1", "RANK": str(rank)} for rank in range(shards)]
    answer = ask("paralab.worker.proofs.prove_shards", question, DEADLINE_SECONDS, "proof", ranks)
    if answer.code is None:
        problem = f"Proving a {what} plan for {workload} took more than {DEADLINE_SECONDS} s."
        raise UsageError(problem, fix="a smaller model, or ddp or fsdp")
    if answer.code or answer.value is None:
        problem = f"The ranks that prove the {what} plan failed: one {describe_exit(answer.code)}."
        raise ParalabError(problem, detail="\n".join(answer.output.splitlines()[-15:]))
    return msgspec.convert(answer.value, PLANS[what], str_keys=True)
