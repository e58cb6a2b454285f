"""L04: Every rank also lives on GPU 0."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="L04",
    title="Every rank also lives on GPU 0",
    symptom="nvidia-smi shows all processes on GPU 0, and only that one runs out of memory.",
    cause=(
        "`.cuda()` or torch.load came before set_device, or the rank over all machines was used where the local rank is meant."
    ),
    fix="Call set_device with LOCAL_RANK before anything touches a GPU.",
    wrong="""\
model = Net().cuda()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
""",
    right="""\
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = Net().cuda()
""",
    sources=("pytorch/pytorch#159262",),
    limits="Needs several GPUs to be seen in memory; read in the script only.",
)
