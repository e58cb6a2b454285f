"""S12: The wrapped model goes to the CPU and back."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S12",
    title="The wrapped model goes to the CPU and back",
    symptom="No message. From then on no gradient is synchronized.",
    cause="The move can replace the parameters that DDP has hooks on.",
    fix="Copy the state_dict to the CPU instead of the model, or wrap again.",
    wrong="""\
model = DistributedDataParallel(net)
torch.save(model.cpu().module.state_dict(), "net.pt")
model.cuda()
""",
    right="""\
model = DistributedDataParallel(net)
torch.save({name: tensor.cpu() for name, tensor in model.module.state_dict().items()}, "net.pt")
""",
    sources=("pytorch/pytorch#104336",),
    silent=True,
    limits="Needs a GPU to happen; on CPU ranks the move changes nothing, so it is read in the script only.",
)
