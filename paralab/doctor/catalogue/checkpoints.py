"""Checkpoints: what is saved, by whom, and what is loaded."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
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
    ),
    Entry(
        id="C02",
        title="strict=False, and nothing was loaded",
        symptom="No message. Training goes on from random weights.",
        cause="All names differ (by the prefix 'module.'), strict=False allows it, and nobody looks at what is returned.",
        fix="Remove the prefix and load strictly, or check the names that load_state_dict returns.",
        wrong="""\
state = torch.load("net.pt", map_location="cpu")
net.load_state_dict(state, strict=False)
""",
        right="""\
state = torch.load("net.pt", map_location="cpu")
net.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
""",
        sources=("pytorch/examples#1029",),
        silent=True,
    ),
    Entry(
        id="C03",
        title="Every rank saves to the same file",
        symptom="Now and then a checkpoint that cannot be read: 'PytorchStreamReader failed reading file'.",
        cause="The ranks open and shorten the file at the same time, and write into each other's bytes.",
        fix="Save on rank 0 only, let the others wait, and rename a finished file into place.",
        wrong="""\
torch.save(model.module.state_dict(), "net.pt")
""",
        right="""\
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "net.pt.new")
    os.replace("net.pt.new", "net.pt")
dist.barrier()
""",
        sources=("DLLXW/baby-llama2-chinese#56", "MLI-lab/DeepDeWedge#41", "pytorch/pytorch#73168"),
        silent=True,
    ),
    Entry(
        id="C04",
        title="torch.load without map_location",
        symptom="Every rank puts a copy of the weights on GPU 0, which then runs out of memory.",
        cause="Tensors go back to the device from which they were saved.",
        fix="`map_location='cpu'`, or the rank's own device.",
        wrong="""\
state = torch.load("net.pt")
""",
        right="""\
state = torch.load("net.pt", map_location="cpu")
""",
        limits="Needs GPUs to be seen; read in the script only.",
    ),
)
