"""C01: Names that begin with 'module.'."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="C01",
    title="Names that begin with 'module.'",
    symptom='\'Missing key(s) in state_dict: "0.weight" … Unexpected key(s): "module.0.weight"\'.',
    cause="The state_dict of the wrapper was saved; its names have a prefix that the bare model does not know.",
    fix="Save `model.module.state_dict()`.",
    wrong="""\
model = DistributedDataParallel(net)
torch.save(model.state_dict(), "net.pt")
""",
    right="""\
model = DistributedDataParallel(net)
torch.save(model.module.state_dict(), "net.pt")
""",
    sources=(
        "pytorch/pytorch#3805",
        "menzelab/implicit-shape-reconstruction#2",
        "facebookresearch/fairchem#76",
    ),
)
