"""S09: BatchNorm sees the small batch of one rank."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="S09",
    title="BatchNorm sees the small batch of one rank",
    symptom="Less accurate than on one GPU, or 'Expected more than 1 value per channel when training' on the last batch.",
    cause="Every rank normalizes with its own few samples, and only the running statistics of rank 0 are kept.",
    fix="`SyncBatchNorm.convert_sync_batchnorm` (GPU only), larger batches per rank, drop_last=True.",
    wrong="""\
model = DistributedDataParallel(net_with_batch_norm.to(device), device_ids=[device.index])
""",
    right="""\
model = SyncBatchNorm.convert_sync_batchnorm(net_with_batch_norm).to(device)
model = DistributedDataParallel(model, device_ids=[device.index])
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
