"""What the inspection of a workload finds, and what plans refuse because of it."""

import textwrap

import pytest

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.machine.precision import Probe
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.worker.inspection.inspect_workload import inspect_workload
from paralab.workload.summary import Inspection
from paralab.workload.trial_steps import OUTSIDE

FILE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

X = torch.randn(64, 8)
Y = (X.sum(1) > 0).long()

def base(**fields):
    layers = lambda: (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    model = lambda: nn.Sequential(*layers())
    return {"model": model, "data": (X, Y), "loss": F.cross_entropy, "batch_size": 8} | fields

def plain(): return base()
def adamw(): return base(optimizer=lambda p: torch.optim.AdamW(p, 1e-3))
def adafactor(): return base(optimizer=lambda p: torch.optim.Adafactor(p, 1e-2))

class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)

def clipping(): return base(optimizer=lambda p: Clipping(p, 0.1))
def clipping_in_a_hook():
    def optimizer(parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        clip = lambda *_: nn.utils.clip_grad_norm_(parameters, 0.05) and None
        optimizer.register_step_pre_hook(clip)
        return optimizer
    return base(optimizer=optimizer)
def by_position():
    slow = lambda p: [{"params": p[:2], "lr": 0.01}, {"params": p[2:]}]
    return base(optimizer=lambda p: torch.optim.SGD(slow(p), 0.1))
def by_shape():
    vectors = lambda p, one: {"params": [q for q in p if (q.ndim == 1) is one], "lr": 0.1 + one}
    return base(optimizer=lambda p: torch.optim.SGD([vectors(p, True), vectors(p, False)], 0.1))
def two_optimizers():
    return base(optimizer=lambda p: [torch.optim.SGD(p[:1], 0.1), torch.optim.SGD(p[1:], 0.1)])
def plateau(): return base(scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o))

class Endless(IterableDataset):
    def __len__(self): return 64
    def __iter__(self): return zip(X, Y)

def iterable(): return base(data=Endless())

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)
    def forward(self, x, y):
        logits = self.b(torch.relu(self.a(x)))
        return logits, F.cross_entropy(logits, y)

def own_loss(): return base(model=Own, unpack=lambda b: (b, b[1]), loss=lambda o, _: o[1])

class Weighted(Own):  # two losses, with trained weights in the output
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))
    def forward(self, x): return self.b(torch.relu(self.a(x))), self.weights

def weighted():
    loss = lambda o, t: o[1].exp()[0] * F.cross_entropy(o[0], t) - o[1].sum()
    return base(model=Weighted, loss=loss)

def hooked():
    def model():
        layer = nn.Linear(8, 2)
        layer.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return layer
    return base(model=model)

def decayed():
    models = []
    def model():
        models.append(nn.Linear(8, 2))
        return models[-1]
    def loss(output, target):
        device = next(models[-1].parameters()).device  # this does not count
        return F.cross_entropy(output.to(device), target) + models[-1].bias.square().sum()
    return base(model=model, loss=loss)

def sparse():
    model = lambda: nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 2))
    return base(model=model, data=(torch.randint(8, (64, 3)), Y))

class Rare(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.rare, self.o = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.o(torch.relu(self.rare(h)) if (x[:, 0] > 1).all() else h)

def rare(): return base(model=Rare)

class Alternating(Rare):
    calls = 0
    def forward(self, x):
        self.calls += 1
        h = torch.relu(self.a(x))
        return self.o(torch.relu(self.rare(h)) if self.calls % 2 else h)

def alternating(): return base(model=Alternating)

class Random(nn.Module):
    def forward(self, x): return x + torch.randn_like(x)

def random(): return base(model=lambda: nn.Sequential(nn.Linear(8, 2), Random()))
def dropout(): return base(model=lambda: nn.Sequential(nn.Linear(8, 2), nn.Dropout(0.5)))
def functional_norm():
    class Normed(nn.Module):
        def forward(self, x): return F.batch_norm(x, None, None, training=True)
    return base(model=lambda: nn.Sequential(nn.Linear(8, 2), Normed()))

class Cached(nn.Module):
    cache = None
    def forward(self, x):
        if self.cache is None: self.cache = torch.ones(8)
        return x * self.cache

class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    def forward(self, x):
        x = x.detach().requires_grad_()
        result = self.layers(x)
        [slope] = torch.autograd.grad(result.sum(), x, create_graph=True)
        return result, slope

def penalized():
    return base(model=Penalized, loss=lambda o, t: F.cross_entropy(o[0], t) + o[1].square().mean())

class Counting(nn.Module):
    def forward(self, x):
        calls.append(1)
        return x * len(calls)

calls = []
def counting(): return base(model=lambda: nn.Sequential(nn.Linear(8, 2), Counting()))

class Centered(nn.Linear):
    def forward(self, x): return super().forward(x.mul_(2.0).sub_(1.0))

def in_place(): return base(model=lambda: Centered(8, 2))

def class_weights():  # verification runs in fp64
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    projection = torch.randn(8, 4)
    class Projected(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.projection = projection
        def forward(self, x): return super().forward(x @ self.projection)
    weight = lambda batch: float(loss.weight[batch[1]].sum())
    return base(model=Projected, loss=loss, weight=weight)

def cached(): return base(model=lambda: nn.Sequential(Cached(), nn.Linear(8, 2)))
"""


@pytest.fixture(scope="module")
def inspect(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspected") / "workloads.py"
    path.write_text(textwrap.dedent(FILE))
    return lambda name: inspect_workload(
        Inspection(f"{path}:{name}", "cpu", layers=True, units=True, verify=True)
    )


MACHINE = Machine(2, 2**34, "a CPU", "linux", "3.11", "2.13.0", None, (), ("gloo",), "none")


def planned(summary, strategy, **options):
    return resolve(
        Request(strategy, **options), MACHINE, summary, lambda name: Probe(True, "tried"), None
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "plain",
            {
                "state": (),
                "random": False,
                "dropout": False,
                "unused": (),
                "sometimes": (),
                "split_problem": None,
                "hooked": (),
                "inner_backward": False,
                "read_by_loss": (),
            },
        ),
        ("hooked", {"hooked": ("weight",)}),
        ("decayed", {"read_by_loss": ("bias",), "split_problem": None}),
        ("adamw", {"whole_tensors": False, "whole_model": False}),
        ("adafactor", {"whole_tensors": True, "whole_model": False}),
        ("clipping", {"whole_model": True}),
        ("clipping_in_a_hook", {"whole_model": True}),
        ("by_position", {"by_position": True}),
        ("by_shape", {"by_position": False}),
        ("own_loss", {"unbatched": True, "split_problem": None}),
        ("weighted", {"unbatched": True, "split_problem": None}),
        ("dropout", {"unbatched": False}),
        ("sparse", {"sparse": ("0.weight",)}),
        ("rare", {"unused": ("rare.weight", "rare.bias"), "sometimes": ("rare",), "state": ()}),
        ("alternating", {"state": ("calls",), "random": False, "sometimes": ("rare",)}),
        ("random", {"random": True, "dropout": False, "state": (), "split_problem": None}),
        ("dropout", {"random": False, "dropout": True, "state": ()}),
        ("functional_norm", {"batch_norms": 1, "random": False, "split_problem": None}),
        ("cached", {"state": (), "random": False}),
        ("penalized", {"state": (), "unused": (), "inner_backward": True}),
        ("in_place", {"state": (), "random": False, "split_problem": None}),
        ("class_weights", {"state": (), "split_problem": None}),
    ],
)
def test_the_summary(inspect, name, fields):
    summary = inspect(name)
    assert {field: getattr(summary, field) for field in fields} == fields


def test_a_global_that_changes_is_named(inspect):
    """Parts of a batch once differed from the whole batch, so the model seemed to mix samples."""
    summary = inspect("counting")
    assert summary.state == (OUTSIDE,)
    assert OUTSIDE in summary.split_problem


@pytest.mark.parametrize("name", ["two_optimizers", "plateau", "iterable"])
def test_what_no_strategy_can_train_is_refused(inspect, name):
    with pytest.raises(UsageError):
        inspect(name)


@pytest.mark.parametrize(
    ("name", "strategy", "options", "works"),
    [
        ("adafactor", "fsdp", {}, "ddp"),
        ("clipping", "pipeline", {"schedule": "1f1b"}, "pipeline"),
        ("own_loss", "dp", {}, "ddp"),
        ("sparse", "fsdp", {}, "ddp"),
        ("rare", "hybrid", {}, "ddp"),
        ("by_position", "pipeline", {"schedule": "1f1b"}, "pipeline"),
        ("penalized", "fsdp", {}, "ddp"),
        ("hooked", "fsdp", {}, "ddp"),
        ("hooked", "tp", {}, "ddp"),
        ("weighted", "dp", {}, "ddp"),
        ("decayed", "fsdp", {}, "ddp"),
        ("decayed", "tp", {}, "ddp"),
        ("decayed", "pipeline", {"schedule": "1f1b"}, "ddp"),
    ],
)
def test_what_a_strategy_would_train_wrongly_is_refused(inspect, name, strategy, options, works):
    summary = inspect(name)
    with pytest.raises(UsageError):
        planned(summary, strategy, **options)
    assert planned(summary, works).strategy == works


def test_no_stage_begins_at_a_module_that_only_some_forwards_call(inspect):
    assert "rare" not in [layer.name for layer in inspect("rare").layers]
    assert "rare" not in [layer.name for layer in inspect("alternating").layers]


def test_ddp_looks_for_unused_parameters_if_only_some_samples_use_them(inspect):
    assert planned(inspect("rare"), "ddp").find_unused
    assert not planned(inspect("plain"), "ddp").find_unused
    assert planned(inspect("plain"), "ddp", find_unused=True).find_unused
