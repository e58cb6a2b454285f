"""The configurations of each practical: a short key for templates, a label, and what to train."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paralab.errors import UsageError
from paralab.experiment.configurations import Configuration
from paralab.machine.host import Machine
from paralab.plan.request import Request
from paralab.workload.summary import Summary

FAINT = "mlp:faint"  # its loss is so small that fp16 gradients underflow
MOST = 3  # up to this many times as many rounds while a question has no clear answer
LONGEST_SECONDS = 600  # the time limit for these rounds
SLOW_STEPS = 4  # fp16 on a CPU without fp16 arithmetic is ten times slower

LABELS: Mapping[str, str] = {
    "single": "single",
    "dp2": "DataParallel, 2 devices",
    "dp3": "DataParallel, 3 devices",
    "dp4": "DataParallel, 4 devices",
    "dp5": "DataParallel, 5 devices",
    "ddp2": "DDP, 2 ranks",
    "ddp4": "DDP, 4 ranks",
    "odd": "DDP, one more sample",
    "small_buckets": "DDP, small buckets",
    "one_bucket": "DDP, one bucket",
    "ddp": "DDP",
    "accumulate": "accumulate 4",
    "sync": "accumulate 4 without no_sync()",
    "bf16": "bf16",
    "fp16": "fp16 with GradScaler",
    "both": "accumulate 4 and bf16",
    "both_fp16": "accumulate 4 and fp16",
    "faint": "small loss, fp32",
    "faint_scaled": "small loss, fp16 with GradScaler",
    "faint_bare": "small loss, fp16 without GradScaler",
    "faint_bf16": "small loss, bf16",
    "hybrid": "hybrid, 4 micro-batches",
    "micro2": "hybrid, 2 micro-batches",
    "micro8": "hybrid, 8 micro-batches",
    "half": "hybrid, half the batch",
    "double": "hybrid, twice the batch",
    "pipeline": "one process",
    "same": "hybrid, second device = first",
}
KEYS = {label: key for key, label in LABELS.items()}
# Skip these on a machine that cannot train in low precision.
LOW = frozenset({"bf16", "fp16", "both", "both_fp16", "faint_scaled", "faint_bare", "faint_bf16"})


@dataclass(frozen=True)
class Practical:
    """One practical and its defaults. Its template names the configurations that it needs."""

    name: str
    workload: str
    rounds: int
    steps: int

    @property
    def template(self) -> str:
        return self.name if self.name == "handbook" else f"practical{self.name}"

    @property
    def limit(self) -> str:
        """How long to keep measuring while a question has no clear answer."""
        return f"{MOST * self.rounds} rounds or {LONGEST_SECONDS // 60} minutes"


def configurations(base: Request, machine: Machine, summary: Summary) -> dict[str, Configuration]:
    """Return the configurations that this machine should train, by key."""
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    batch, megabytes = base.batch_size or summary.batch_size, summary.parameter_bytes / 2**20
    slow_steps = base.steps if on_gpu else SLOW_STEPS
    dp, ddp = replace(base, strategy="dp", replicas=2), replace(base, strategy="ddp", replicas=2)
    faint = replace(ddp, workload=FAINT, batch_size=None, steps=slow_steps)
    hybrid = replace(base, strategy="hybrid", replicas=2, stages=2, micro_batches=4)
    requests = {
        "single": base,
        "dp2": dp,
        "dp3": replace(dp, replicas=3),
        "dp5": replace(dp, replicas=5),
        "ddp2": ddp,
        "odd": replace(ddp, batch_size=batch + 1),
        "small_buckets": replace(ddp, bucket_mb=max(0.001, round(megabytes / 8, 3))),
        "one_bucket": replace(ddp, bucket_mb=max(1.0, round(2 * megabytes))),
        "ddp": ddp,
        "accumulate": replace(ddp, accumulate=4),
        "sync": replace(ddp, accumulate=4, sync_every_pass=True),
        "bf16": replace(ddp, precision="bf16"),
        "fp16": replace(ddp, precision="fp16", steps=slow_steps),
        "both": replace(ddp, precision="bf16", accumulate=4),
        "faint": faint,
        "faint_scaled": replace(faint, precision="fp16"),
        "faint_bare": replace(faint, precision="fp16", no_scaler=True),
        "faint_bf16": replace(faint, precision="bf16"),
        "hybrid": hybrid,
        "micro2": replace(hybrid, micro_batches=2),
        "micro8": replace(hybrid, micro_batches=8),
        "half": replace(hybrid, batch_size=batch // 2),
        "double": replace(hybrid, batch_size=batch * 2),
        "pipeline": replace(base, strategy="pipeline", stages=2, micro_batches=4),
        "same": replace(hybrid, placement="same"),
    }
    if machine.cores >= 4 or len(machine.gpus) >= 4:
        requests |= {"dp4": replace(dp, replicas=4), "ddp4": replace(ddp, replicas=4)}
    if on_gpu:
        requests["both_fp16"] = replace(ddp, precision="fp16", accumulate=4)
    return {
        key: Configuration(request, LABELS[key], optional=key in LOW)
        for key, request in requests.items()
    }


PRACTICALS: Mapping[str, Practical] = {
    practical.name: practical
    for practical in (
        Practical("5", "mlp", 7, 20),
        Practical("6", "mlp", 7, 20),
        Practical("7", "gpt", 5, 8),
        Practical("10", "mlp", 5, 10),
        Practical("handbook", "mlp", 7, 20),
    )
}


def find(name: str | int) -> Practical:
    if str(name) not in PRACTICALS:
        raise UsageError(f"There is no practical {name}.", fix=f"choose {', '.join(PRACTICALS)}")
    return PRACTICALS[str(name)]
