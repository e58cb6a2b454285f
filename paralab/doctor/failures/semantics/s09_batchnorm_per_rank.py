"""S09: BatchNorm sees only the small batch of one rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.events import Forward
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, make_finding
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.facts import Call
from paralab.doctor.static.models import buffers_of, wraps
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.project import dotted_key
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script
from paralab.units import plural

ENTRY = Entry(
    id="S09",
    title="BatchNorm sees only the small batch of one rank",
    symptom="Lower accuracy than on one GPU, or 'Expected more than 1 value per channel when training' on the last batch.",
    cause="Every rank normalizes with its own few samples, and only rank 0's running statistics are kept.",
    fix="Use `SyncBatchNorm.convert_sync_batchnorm` (GPU only), larger batches per rank, or drop_last=True.",
    example="""\
- model = DistributedDataParallel(net_with_batch_norm.to(device), device_ids=[device.index])
+ model = SyncBatchNorm.convert_sync_batchnorm(net_with_batch_norm).to(device)
+ model = DistributedDataParallel(model, device_ids=[device.index])
""",
    sources=(
        "LibreYOLO/libreyolo#531",
        "ultralytics/yolov5#401",
        "pytorch/pytorch#2584",
        "pytorch/pytorch#49794",
        "MCG-NJU/TDN#22",
    ),
    messages=(
        Message(
            r"Expected more than 1 value per channel when training, got input size "
            r"torch\.Size\(\[(?P<shape>[\d, ]+)\]\)",
            "{who} got a batch of shape ({shape}){at}. BatchNorm cannot normalize one row. It is the "
            "remainder of the dataset on this rank.",
            fix="Set drop_last=True in the DataLoader, or use larger batches per rank.",
        ),
        Message(
            r"SyncBatchNorm (?:layers only work with GPU modules|expected input tensor to be on)",
            "SyncBatchNorm{at} only works on GPUs, but the model is on the CPU.",
            fix="Call convert_sync_batchnorm only if the model is on a GPU.",
        ),
    ),
)
SMALL_BATCH = 16  # samples per rank; with fewer, the statistics of a BatchNorm are noise
ONE_VALUE = "Expected more than 1 value per channel when training"


@check("S09", source="script")
def small_batches(script: Script) -> Iterator[Finding]:
    """Report a DDP model with BatchNorm whose training loader has small batches."""
    if script.methods("convert_sync_batchnorm", "SyncBatchNorm"):
        return
    sizes = [(loader, *_batch_size(script, loader)) for loader in script.calls_of(LOADER)]
    known = [(size, sure, loader) for loader, size, sure in sizes if size is not None]
    for wrap in wraps(script) if known else ():
        norms = buffers_of(script, wrap.argument(0, "module"), wrap.scope) or ""
        size, sure, loader = max(known, key=lambda one: one[0])
        if "BatchNorm" not in norms or size >= SMALL_BATCH:
            continue
        why = (
            f"{norms} normalizes over each rank's own batch of {plural(size, 'sample')} "
            f"({line_of(loader, wrap)}). Such statistics are noisy, and only rank 0's are kept."
        )
        if not sure:
            why += " Certain if nobody changes that default."
        fix = (
            "Use nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP (GPUs only), GroupNorm or "
            "LayerNorm, or larger batches."
        )
        severity: Severity = "warning" if sure else "suspect"
        yield found(script, "S09", severity, wrap, why, fix, also=(loader,))


def _batch_size(script: Script, loader: Call) -> tuple[int | None, bool]:
    """Return the batch size of a training loader, and whether no option can change it."""
    sampler = loader.argument(99, "sampler")
    given = loader.argument(1, "batch_size")
    if given is None or not script.is_kind(sampler, loader.scope, "distributed sampler"):
        return None, False
    assert sampler is not None
    for maker in script.makers(sampler, loader.scope):
        shuffle = maker.argument(3, "shuffle")
        if isinstance(shuffle, ast.Constant) and not shuffle.value:
            return None, False  # evaluation
    size = script.evaluate(given, loader.scope, 0)
    if isinstance(size, int):
        return size, True
    flag = script.flags.get((dotted_key(given) or "").rpartition(".")[2])
    for keyword in flag.keywords if flag else ():
        if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
            size = keyword.value.value
    return (size if isinstance(size, int) else None), False


@check("S09", source="ranks")
def batches_of_one_rank(seen: Observation) -> Iterator[Finding]:
    """Report a batch of one sample that raised, or a BatchNorm that sees few samples per rank."""
    for rank in seen.ranks:
        if rank.raised and ONE_VALUE in rank.raised.message:
            why = (
                f"On rank {rank.rank}, BatchNorm got a batch of one sample, which has no variance: "
                "the last batch of its share of the data."
            )
            fix = "Pass drop_last=True to the DataLoader."
            evidence = rank.raised.message.splitlines()[0][:160]
            place = rank.raised.place
            yield make_finding("S09", "error", why, place, evidence, rank.rank, fix=fix)
            return
    for wrap in ddp_wraps(seen.ranks[0]) if is_data_parallel(seen) else []:
        forwards = [one for one in seen.ranks[0].of(Forward) if one.model == wrap.model]
        sizes = [one.size for one in forwards if one.training and one.grad and one.size]
        usual = max(set(sizes), key=sizes.count) if sizes else SMALL_BATCH
        if not wrap.batch_norms or wrap.sync_batch_norms or usual >= SMALL_BATCH:
            continue
        why = (
            f"{wrap.model_class} has {plural(wrap.batch_norms, 'BatchNorm layer')}. Each normalizes "
            f"over the {usual} samples of one rank, not over the {usual * seen.world} of all "
            f"{seen.world}, and only rank 0's running statistics are kept."
        )
        evidence = f"samples per forward on rank 0: {usual}, {len(sizes)} passes"
        yield make_finding("S09", "warning", why, wrap, evidence)
