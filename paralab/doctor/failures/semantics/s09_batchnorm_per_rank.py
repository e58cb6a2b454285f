"""S09: BatchNorm sees only one rank's small batch.

Symptom: Lower accuracy than on one GPU, or 'Expected more than 1 value per channel when training' on the last batch.
Cause: Every rank normalizes with its own few samples, and DDP keeps only rank 0's running statistics.
Fix: Use `SyncBatchNorm.convert_sync_batchnorm` (GPUs only), GroupNorm or LayerNorm, or larger batches per rank.
Reported: LibreYOLO/libreyolo#531 ultralytics/yolov5#401 pytorch/pytorch#2584 #49794 MCG-NJU/TDN#22

- model = DistributedDataParallel(net_with_batch_norm.to(device), device_ids=[device.index])
+ model = SyncBatchNorm.convert_sync_batchnorm(net_with_batch_norm).to(device)
+ model = DistributedDataParallel(model, device_ids=[device.index])
"""

from paralab.doctor.events import Forward
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, make_finding
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.facts import Call, is_constant
from paralab.doctor.static.models import buffers_of, wraps
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script
from paralab.units import plural

ENTRY = describe(
    __doc__,
    Message(
        r"Expected more than 1 value per channel when training, got input size "
        r"torch\.Size\(\[(?P<shape>[\d, ]+)\]\)",
        "{who} got a batch of shape ({shape}){at}, and BatchNorm cannot normalize one row. It is "
        "usually the last batch of this rank's data.",
        fix="Set drop_last=True in the DataLoader, or use larger batches per rank.",
    ),
    Message(
        r"SyncBatchNorm (?:layers only work with GPU modules|expected input tensor to be on)",
        "SyncBatchNorm{at} only works on GPUs, but the model is on the CPU.",
        fix="Call convert_sync_batchnorm only if the model is on a GPU.",
    ),
)
SMALL_BATCH = 16  # samples per rank; with fewer, BatchNorm statistics are mostly noise


@check("S09", source="script")
def small_batches(script: Script) -> Findings:
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
            f"({line_of(loader, wrap)}). Such statistics are noisy, and DDP keeps only rank 0's."
        )
        doubt = "" if sure else "if nothing changes that default"
        yield found(script, "S09", "warning", wrap, why, doubt=doubt, also=(loader,))


def _batch_size(script: Script, loader: Call) -> tuple[int | None, bool]:
    """Return a training loader's batch size, and whether it is fixed (no option can change it)."""
    sampler = loader.argument(99, "sampler")
    given = loader.argument(1, "batch_size")
    if given is None or not script.is_kind(sampler, loader.scope, "distributed sampler"):
        return None, False
    made = script.makers(sampler, loader.scope)
    if any(is_constant(maker.argument(3, "shuffle"), False) for maker in made):
        return None, False  # an unshuffled loader is for evaluation
    size = script.evaluate(given, loader.scope, 0)
    if isinstance(size, int):
        return size, True
    size = script.usual_value(given, loader.scope)
    return (size if isinstance(size, int) else None), False


@check("S09", source="ranks")
def batches_of_one_rank(seen: Observation) -> Findings:
    for wrap in ddp_wraps(seen.ranks[0]) if is_data_parallel(seen) else []:
        forwards = [one for one in seen.ranks[0].of(Forward) if one.model == wrap.model]
        sizes = [one.size for one in forwards if one.training and one.grad and one.size]
        usual = max(set(sizes), key=sizes.count) if sizes else SMALL_BATCH
        if not wrap.batch_norms or wrap.sync_batch_norms or usual >= SMALL_BATCH:
            continue
        why = (
            f"{wrap.model_class} has {plural(wrap.batch_norms, 'BatchNorm layer')}. Each normalizes "
            f"over the {usual} samples of one rank, not over the {usual * seen.world} of all "
            f"{seen.world}, and DDP keeps only rank 0's running statistics."
        )
        yield make_finding("S09", "warning", why, wrap)
