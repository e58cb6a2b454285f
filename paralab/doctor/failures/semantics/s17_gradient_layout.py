"""S17: A gradient is laid out otherwise than its bucket."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S17",
    title="A gradient is laid out otherwise than its bucket",
    symptom="'Grad strides do not match bucket view strides', once, without a name.",
    cause=(
        "DDP lays out its buckets as the parameters were when it wrapped them; a model that goes to channels_last afterwards "
        "has gradients in another memory order. A 1×1 convolution of permuted or channels_last data differs in name only."
    ),
    fix="Change the layout before wrapping, `.contiguous()` after permute; for 1×1 convolutions it costs nothing and can stay.",
    wrong="""\
model = DistributedDataParallel(model)
model.to(memory_format=torch.channels_last)
""",
    right="""\
model.to(memory_format=torch.channels_last)
model = DistributedDataParallel(model)
""",
    sources=("pytorch/pytorch#47163", "CompVis/latent-diffusion#281", "XPixelGroup/HAT#154"),
)
