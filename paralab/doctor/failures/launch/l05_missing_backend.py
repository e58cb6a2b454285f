"""L05: This build of torch does not have the backend.

Symptom: 'Distributed package doesn't have NCCL built in'.
Cause: torch builds for CPUs, Windows, or macOS come with gloo only.
Fix: Use gloo where there is no GPU, or install the CUDA build.

- dist.init_process_group("nccl")
+ dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Finding, Findings, Message, check, describe
from paralab.units import plural

ENTRY = describe(
    __doc__,
    Message(
        r"Distributed package doesn't have (?P<backend>\w+) built in"
        r"|ProcessGroupNCCL is only supported with GPUs, no GPUs found|NCCL is not available",
        "{who} requests NCCL or another backend that is not available{at}: this build of torch does "
        "not have it, or the machine has no GPU.",
    ),
)


@check("L05", source="machine")
def missing_backend(facts: Facts) -> Findings:
    torch = facts.torch
    if torch is None:
        return
    if facts.driver_gpus and "nccl" not in torch.backends:
        built = "without CUDA" if torch.cuda is None else f"for CUDA {torch.cuda}, without NCCL"
        gpus = plural(len(facts.driver_gpus), "GPU")
        evidence = facts.evidence("torch", "GPUs (driver)")
        why = f"This machine has {gpus}, but torch {torch.version} is built {built}, so backend='nccl' fails."
        yield Finding("L05", "error", why, evidence=evidence)
    elif not torch.backends:
        why = f"torch {torch.version} is built without torch.distributed, so it has neither gloo nor NCCL."
        fix = "Install an official torch wheel."
        yield Finding("L05", "error", why, fix, evidence=facts.evidence("torch"))
