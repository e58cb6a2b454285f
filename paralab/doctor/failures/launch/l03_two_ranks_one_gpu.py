"""L03: Two ranks on one GPU.

Symptom: 'ncclInvalidUsage … Duplicate GPU detected : rank 0 and rank 1 both on CUDA device …'.
Cause: Every rank uses 'cuda:0' because nothing sets the device from LOCAL_RANK, or there are more
ranks than GPUs. From NCCL 2.30 (torch 2.14) on, NCCL_MULTI_RANK_GPU_ENABLE=1 allows this
(experimental).
Fix: Call `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`, and start at most one rank per GPU.
Limits: Needs NCCL; CPU ranks cannot trigger it, so only scripts and logs show it.
Reported: Peterande/D-FINE#289 NVIDIA/Megatron-LM#661 csguoh/MambaIR#39 facebookresearch/fairchem#597 verl-project/verl#161

- device = torch.device("cuda:0")
+ device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
+ torch.cuda.set_device(device)
  dist.init_process_group("nccl")
  model = DistributedDataParallel(model.to(device))
"""

from paralab.doctor.failures.launch.devices import destination, fixed_device, hides_gpus, moves
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Finding, Findings, Message, Severity, check, describe, printed
from paralab.doctor.static.names import DDP, INIT, SET_DEVICE
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script
from paralab.units import plural

ENTRY = describe(
    __doc__,
    printed(
        r"Duplicate GPU detected : rank (?P<rank>\d+) and rank (?P<other>\d+) both on CUDA device "
        r"(?P<device>\w+)",
        "Ranks {rank} and {other} both use the GPU {device}: no rank called "
        "torch.cuda.set_device(LOCAL_RANK), or there are more ranks than GPUs.",
        blames=False,
    ),
    Message(
        r"invalid device ordinal|device >= 0 && device < num_gpus",
        "{who} uses a GPU that does not exist{at}: there are more ranks than visible GPUs.",
        fix="Start at most one rank per GPU (--nproc_per_node), and check CUDA_VISIBLE_DEVICES.",
    ),
)


_REFUSED = "NCCL rejects two ranks on one GPU."
_ALL_VISIBLE = "unless the launcher makes only one GPU visible to each rank"


@check("L03", source="script")
def one_gpu_for_all_ranks(script: Script) -> Findings:
    """Flag a script in which every rank uses the same GPU."""
    starts = script.calls_of(INIT)
    backends = [start.argument(0, "backend") for start in starts]
    if not starts or hides_gpus(script) or all("gloo" in code(one) for one in backends):
        return
    chosen = script.calls_of(SET_DEVICE)
    fixed = [fixed_device(script, call.argument(0, "device"), call.scope) for call in chosen]
    if fixed and all(fixed):
        why = f"`{code(chosen[0].node)}` chooses {fixed[0]} on every rank. {_REFUSED}"
        yield found(script, "L03", "suspect", chosen[0], why, doubt=_ALL_VISIBLE)
    wraps = script.calls_of(DDP)
    placed = any(one.argument(1, "device_ids") for one in wraps)
    if chosen or not wraps or placed or any(start.argument(99, "device_id") for start in starts):
        return
    models = [c for c in moves(script) if script.is_kind(c.receiver, c.scope, "module")]
    devices = [destination(script, call) for call in models]
    if devices and None not in devices:
        move, device = models[-1], devices[-1]
        why = f"`{code(move.node)}` puts the model of every rank on {device}, and nothing calls torch.cuda.set_device. {_REFUSED}"
        yield found(script, "L03", "suspect", move, why, doubt=_ALL_VISIBLE, also=(wraps[0],))


@check("L03", source="machine")
def visible_devices(facts: Facts) -> Findings:
    """Report a CUDA_VISIBLE_DEVICES that does not match the machine, and more ranks than GPUs."""
    asked = facts.environment.get("CUDA_VISIBLE_DEVICES")
    gpus = facts.driver_gpus or ()
    problem = _problem(asked, len(gpus)) if asked is not None else None
    if problem is not None:
        severity, why, fix = problem
        yield Finding("L03", severity, why, fix, evidence=facts.evidence("CUDA_VISIBLE_DEVICES"))
    ranks = facts.launch.local_ranks
    if ranks and facts.gpus and ranks > len(facts.gpus) and not _one_each(facts):
        why = f"{ranks} ranks on this machine share {plural(len(facts.gpus), 'GPU')}. {_REFUSED}"
        fix = f"Start at most {plural(len(facts.gpus), 'rank')} here (--nproc_per_node), or use backend='gloo'."
        yield Finding("L03", "error", why, fix, evidence=facts.evidence("GPUs (torch)", "launcher"))


def _problem(asked: str, gpus: int) -> tuple[Severity, str, str] | None:
    names = [name.strip() for name in asked.split(",")]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    beyond = [name for name in names if name.isdigit() and gpus and int(name) >= gpus]
    if twice:
        why = f"CUDA_VISIBLE_DEVICES={asked} names GPU {', '.join(twice)} twice. CUDA then shows no GPU, or two ranks share one."
        return "error", why, "Name each GPU once."
    if beyond:
        why = f"CUDA_VISIBLE_DEVICES={asked}, but this machine has {plural(gpus, 'GPU')}. CUDA ignores {beyond[0]} and everything after it."
        return "error", why, f"Use numbers from 0 to {gpus - 1}."
    if asked.strip() in ("", "-1") and gpus:
        why = f"CUDA_VISIBLE_DEVICES={asked!r} hides all {plural(gpus, 'GPU')} of this machine, so training would run on the CPU."
        return "warning", why, "Unset CUDA_VISIBLE_DEVICES, unless you want the CPU."
    return None


def _one_each(facts: Facts) -> bool:
    """Return whether Slurm shows each task only its own GPUs: then it is fine to see fewer GPUs
    than ranks."""
    on_node = facts.environment.get("SLURM_GPUS_ON_NODE", "")
    enough = on_node.isdigit() and int(on_node) >= (facts.launch.local_ranks or 0)
    return enough or "SLURM_GPUS_PER_TASK" in facts.environment
