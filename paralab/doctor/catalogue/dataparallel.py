"""nn.DataParallel: one process, many GPUs, replicas that live for one forward."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="D01",
        title="The loss is computed inside, and comes back as a vector",
        symptom=(
            "'Was asked to gather along dimension 0, but all input tensors were scalars', then 'grad can be "
            "implicitly created only …'."
        ),
        cause="Every GPU returns a loss of its own; DataParallel puts them into a vector, and backward wants one number.",
        fix="`loss.mean().backward()`.",
        wrong="""\
model = nn.DataParallel(net_that_returns_its_loss)
loss = model(x, y)
loss.backward()
""",
        right="""\
model = nn.DataParallel(net_that_returns_its_loss)
loss = model(x, y).mean()
loss.backward()
""",
        sources=(
            "Lightning-AI/pytorch-lightning#249",
            "pytorch/pytorch#9811",
            "pytorch/pytorch#7956",
            "airsplay/lxmert#17",
        ),
    ),
    Entry(
        id="D02",
        title="GPU 0 fills up first",
        symptom="Out of memory on GPU 0, with room on the others.",
        cause="The outputs are gathered there, and the parameters, their gradients and the optimizer live there.",
        fix="DistributedDataParallel; or compute the loss inside forward, so that only a number is gathered.",
        wrong="""\
model = nn.DataParallel(net)
loss = criterion(model(x), y)
""",
        right="""\
model = nn.DataParallel(WithLoss(net, criterion))
loss = model(x, y).mean()
""",
        limits="Needs GPUs whose memory can be read.",
    ),
    Entry(
        id="D03",
        title="The batch gives fewer pieces than there are GPUs",
        symptom="'Caught TypeError in replica … missing 1 required positional argument', or some GPUs have nothing to do.",
        cause="Pieces are rounded up: 9 samples over 4 GPUs make pieces of 3, 3 and 3, and the fourth GPU gets none.",
        fix="A batch that is a multiple of the number of GPUs, and drop_last=True.",
        wrong="""\
model = nn.DataParallel(net, device_ids=[0, 1, 2, 3])
loader = DataLoader(data, batch_size=9)
""",
        right="""\
model = nn.DataParallel(net, device_ids=[0, 1, 2, 3])
loader = DataLoader(data, batch_size=8, drop_last=True)
""",
        sources=(
            "pytorch/pytorch#15161",
            "pytorch/pytorch#52260",
            "pytorch/pytorch#16432",
            "MIC-DKFZ/nnUNet#677",
        ),
        silent=True,
    ),
    Entry(
        id="D04",
        title="What forward remembers is lost",
        symptom="No message. Counters and statistics that forward keeps on self stay as they were.",
        cause="forward runs on replicas, which are thrown away; only what happens on the first GPU may survive.",
        fix="DistributedDataParallel; or return the value and keep it outside.",
        wrong="""\
class Net(nn.Module):
    def forward(self, x):
        self.seen = self.seen + len(x)
        return self.layer(x)


model = nn.DataParallel(Net())
""",
        right="""\
class Net(nn.Module):
    def forward(self, x):
        self.seen = self.seen + len(x)
        return self.layer(x)


model = DistributedDataParallel(Net())
""",
        sources=("pytorch/pytorch#1051",),
        silent=True,
        limits="Needs two GPUs to happen; read in the script only.",
    ),
    Entry(
        id="D05",
        title="An attribute of the model, asked of the wrapper",
        symptom="\"'DataParallel' object has no attribute 'weight'\".",
        cause="The wrapper is another module; the model is its `.module`.",
        fix="`model.module.weight`.",
        wrong="""\
model = nn.DataParallel(net)
print(model.weight.norm())
""",
        right="""\
model = nn.DataParallel(net)
print(model.module.weight.norm())
""",
    ),
    Entry(
        id="D06",
        title="DataParallel without GPUs does nothing",
        symptom="No message. It runs as if it were not wrapped.",
        cause="Without CUDA the list of devices is empty, and forward calls the model directly.",
        fix="Check torch.cuda.device_count(); for several CPU processes use DistributedDataParallel with gloo.",
        wrong="""\
model = nn.DataParallel(net)
""",
        right="""\
if torch.cuda.device_count() < 2:
    raise SystemExit("DataParallel needs two GPUs or more")
model = nn.DataParallel(net)
""",
        silent=True,
    ),
    Entry(
        id="D07",
        title="GPUs of different strength",
        symptom="'There is an imbalance between your GPUs. You may want to exclude GPU …'.",
        cause="Every GPU gets an equal share, so the weakest decides the step time and the possible batch.",
        fix="Name the equal ones in device_ids.",
        wrong="""\
model = nn.DataParallel(net)
""",
        right="""\
model = nn.DataParallel(net, device_ids=[0, 1])
""",
        limits="Needs unequal GPUs; recognized in logs.",
    ),
)
