"""Small workloads that once got a false proof, trained wrongly, or hung."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

X = torch.randn(96, 16)
Y = (X.sum(1) > 0).long()


def net(*more):
    return nn.Sequential(
        nn.Linear(16, 24), nn.ReLU(), *more, nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2)
    )


def base(**fields):
    sgd = lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)  # noqa: E731
    return {
        "model": net,
        "data": (X, Y),
        "loss": F.cross_entropy,
        "optimizer": sgd,
        "batch_size": 12,
    } | fields


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.o = (
            nn.Linear(16, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 2),
        )

    def forward(self, x):
        return self.o(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


def lengths():
    """Input lengths recur: 5, 6, 5, … Each length must get its own shapes each time."""

    class Mean(Layers):
        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.o(torch.relu(self.b(h)).sum(1) / h.shape[1])

    def batch(n):
        x = torch.randn(n, int(torch.randint(5, 7, ())), 16)
        return x, (x.sum((1, 2)) > 0).long()

    return base(model=Mean, data=batch, split_points=["b"])


class Sequences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return torch.randn(3 + i % 5, 16, generator=torch.Generator().manual_seed(i)), i % 2


def padded():
    """The model computes a mask from the inputs before all cuts and uses it after them. The first
    layers are frozen."""

    class Masked(Layers):
        def __init__(self):
            super().__init__()
            self.a.requires_grad_(False)
            self.b.requires_grad_(False)

        def forward(self, x, lengths):
            mask = (torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]).to(x.dtype)[
                ..., None
            ]
            h = torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))) * mask
            return self.o(h.sum(1) / lengths[:, None].to(x.dtype))

    def collate(items):
        x = nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True)
        return (
            x,
            torch.tensor([len(item[0]) for item in items]),
            torch.tensor([item[1] for item in items]),
        )

    return base(
        model=Masked, data=Sequences(), collate=collate, unpack=lambda batch: (batch[:2], batch[2])
    )


class Statistic(nn.Module):
    """The model has running statistics. With `used`, forward also reads what it has just
    written."""

    def __init__(self, used):
        super().__init__()
        self.used = used
        self.register_buffer("mean", torch.zeros(24))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, h):
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
            self.seen += len(h)
        return h - self.mean if self.used else h


def stateful():
    """The model has buffers that training never reads, and a counter that scales the output.
    Neither is random."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, h):
            self.calls = self.calls + 1
            return h * (1 + 0.1 * self.calls)

    return base(model=lambda: net(Statistic(used=False), Counting()))


def statistics():
    return base(model=lambda: net(Statistic(used=False)))


def statistics_used():
    return base(model=lambda: net(Statistic(used=True)))


class Noise(nn.Module):
    def forward(self, h):
        return h + torch.randn_like(h) * h.detach().std(1, keepdim=True) + torch.rand(())


def noisy():
    return base(model=lambda: net(Noise()))


def unused():
    """Weight decay would move unused parameters if they got a gradient of zero."""

    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x):
            return torch.relu(self.used(x))

    def decay(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.5)

    return base(
        model=lambda: nn.Sequential(nn.Linear(16, 24), Spare(), Spare(), Spare(), nn.Linear(24, 2)),
        optimizer=decay,
    )


def routed():
    """A branch depends on the inputs, and an index bypasses all cuts."""

    class Routed(Layers):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(2, 2)

        def forward(self, x):
            route = (x[:, 0] > 0).long()
            h = torch.relu(self.a(x))
            if (x[:, 1] > 1.0).any():
                h = torch.where(x[:, 1:2] > 1.0, torch.relu(self.c(h)), h)
            return self.o(torch.relu(self.b(h))) + self.table(route)

    return base(model=Routed)


def late():
    """Some batches skip a submodule for all samples. The first batch does not, so no trial step
    notices."""

    class Late(Layers):
        def forward(self, x):
            h = torch.relu(self.a(x))
            h = h if (x[:, 0] == 99.0).all() else torch.relu(self.b(h))
            return self.o(torch.relu(self.c(h)))

    def batch(n):
        special = torch.randint(3, ()) == 1
        x = torch.randn(n, 16)
        x[:, 0] = torch.where(special, torch.full((n,), 99.0), x[:, 0])
        return x, (x.sum(1) > 0).long()

    return base(model=Late, data=batch, split_points=["b"])


def summed(output, target):
    return F.cross_entropy(output, target, reduction="sum")


def batch_norm_summed():
    return base(model=lambda: net(nn.BatchNorm1d(24)), loss=summed)


def noisy_root():
    return base(
        model=lambda: net(Noise()),
        loss=lambda output, target: F.cross_entropy(output, target).sqrt(),
    )


def class_weights():
    weight = torch.tensor([1.0, 5.0])
    return base(
        loss=lambda output, target: F.cross_entropy(output, target, weight=weight.to(output.dtype))
    )


def contrastive():
    def info_nce(output, target):
        z = F.normalize(output, dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))

    return base(loss=info_nce)


def balanced_experts():
    """The auxiliary loss is a product of two means over the batch."""

    class Balanced(Layers):
        def forward(self, x):
            share = torch.softmax(self.a(x), 1)
            return super().forward(x), (share.mean(0) * share.mean(0).detach()).sum()

    return base(
        model=Balanced, loss=lambda output, target: F.cross_entropy(output[0], target) + output[1]
    )


def mixing_before():
    class Scaling(Layers):
        def forward(self, x):
            return super().forward(x / x.abs().max())

    return base(model=Scaling)


def rare():
    """Class weights that the trial's first batch does not show: its samples are all of one class."""
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0)).tolist()
    target = torch.zeros(len(X), dtype=torch.long)
    target[[n for n in order[12:32] if n < 24]] = 1

    def loss(output, target):
        weight = torch.ones(output.shape[1]).to(output)
        weight[1] = 20.0
        return F.cross_entropy(output, target, weight)

    return base(data=(X, target), loss=loss)


def mixing():
    class Mixing(nn.Module):
        def forward(self, h):
            return h - h.mean(0)

    return base(model=lambda: net(Mixing()))


def root():
    return base(loss=lambda output, target: F.cross_entropy(output, target).sqrt())


def adam():
    return base(optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2))


class Experts(nn.Module):
    """Each sample chooses one expert."""

    def __init__(self, late=False):
        super().__init__()
        self.late = late
        self.i, self.o = nn.Linear(16, 24), nn.Linear(24, 2)
        self.e = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        h = torch.relu(self.i(x))
        chosen = (x[:, 0] == 99.0).long() if self.late else x[:, :3].argmax(1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.e):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]))
        return self.o(out)


def experts():
    return base(model=Experts, batch_size=2)


def experts_late():
    """Both ranks call expert 0 until one sample, in step 10, needs expert 1."""
    special = torch.randperm(96, generator=torch.Generator().manual_seed(0))[20]
    x = X.clone()
    x[special, 0] = 99.0
    return base(model=lambda: Experts(late=True), data=(x, Y), batch_size=2)


def dropping():
    drop = lambda: nn.Dropout(0.4)  # noqa: E731
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(16, 64), nn.ReLU(), drop(), nn.Linear(64, 64), nn.ReLU(), drop(), nn.Linear(64, 2)
    )
    return base(model=model)


def sparse():
    ids = torch.randint(40, (96, 5))
    model = lambda: nn.Sequential(  # noqa: E731
        nn.EmbeddingBag(40, 16, sparse=True), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    return base(
        model=model, data=(ids, Y), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.5)
    )


class Dead(nn.Module):
    """Its ReLU never opens, so all gradients are zero."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 2, bias=False)
        nn.init.constant_(self.first.bias, -100.0)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


def dead():
    return base(model=Dead)
