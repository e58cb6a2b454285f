"""D04: What forward remembers is lost."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
