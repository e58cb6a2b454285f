"""C03: Every rank saves to the same file."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
