"""Small language models for tensor parallelism: embeddings and heads that it can split by words, and
some that it must leave whole. `tensor_ranks.py` proves them on two ranks."""

from contextlib import nullcontext
from dataclasses import asdict, replace

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from paralab.worker.proofs.block_proof import perturb
from paralab.worker.proofs.prove_shards import find_tensor_plan
from paralab.worker.proofs.prove_vocabulary import prove_vocabulary
from paralab.worker.sharding import sharded_embedding, sharded_layers
from paralab.worker.sharding.split_tensors import split_parameter
from paralab.workload.hooks import patched
from paralab.workload.linear_layers import record_calls
from paralab.workload.tensor_group import TensorGroup
from paralab.workload.workload import as_workload

WORDS, WIDTH = 16, 8


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 4.0


class Language(nn.Module):
    """An embedding, a feed-forward layer, a head, and one difficulty."""

    def __init__(self, trick="", tied=False, words=WORDS, kind=nn.Embedding, **options):
        super().__init__()
        self.trick, self.words = trick, kind(words, WIDTH, **options)
        self.other = nn.Embedding(WORDS, WIDTH) if "other" in trick else None
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, words)
        if tied:
            self.head.weight = self.words.weight
        if trick == "shared by other":
            self.other.weight = self.words.weight

    @property
    def weight(self):
        return self.words.weight

    def forward(self, words):
        x = self.words(input=words)
        x = x + self.other(words.flip(1)) if self.other else x
        if "in place" in self.trick:
            x += 1.0
        x = x + self.down(self.up(x).relu())
        if self.trick == "property":
            return F.linear(x, self.weight)
        logits = self.head(x)
        if "in place" in self.trick:
            logits /= 2.0
        return logits


def mean(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def smoothed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def ignoring(logits, targets):
    """The classes are in dim 1, and some targets do not count."""
    return F.cross_entropy(logits.float().mT, targets.masked_fill(targets < 4, -100))


def squared(logits, targets):
    return F.mse_loss(logits.softmax(-1), F.one_hot(targets, WORDS).to(logits.dtype))


def entropy(logits, targets):
    """The gradients of log_softmax alone are wrong in torch's `loss_parallel`."""
    return -(F.log_softmax(logits, -1) * F.one_hot(targets, WORDS)).sum(-1).mean()


MODELS = {
    "plain": {},
    "tied": {"tied": True},
    "padding": {"tied": True, "padding_idx": WORDS - 2},
    "two": {"trick": "other"},
    "subclass": {"kind": Scaled},
    "in place": {"trick": "in place"},
    "smoothed": {"loss": smoothed},
    "smoothed in place": {"loss": smoothed, "trick": "in place"},
    "ignoring": {"loss": ignoring, "tied": True},
    "squared": {"loss": squared},
    "own log-softmax": {"loss": entropy},
    "shared": {"trick": "shared by other", "tied": True},
    "property": {"trick": "property"},
    "uneven": {"words": 17},
    "max_norm": {"max_norm": 1.0},
    "sparse": {"sparse": True},
    "frequency": {"scale_grad_by_freq": True},
}


def workload_of(name, loss=mean, most=WORDS, **options):
    """The samples have only the first `most` words."""
    words = torch.randint(most, (8, 4), generator=torch.Generator().manual_seed(0))

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1)  # Adam refuses sparse gradients

    own = {"model": lambda: Language(**options), "data": (words, words.roll(1, 1)), "loss": loss}
    return as_workload({**own, "optimizer": sgd}, name)


def plan_of(name, **options):
    plan = find_tensor_plan(workload_of(name, **options), 2)
    torch.set_default_dtype(torch.float32)
    return asdict(plan)


def shifted(parameter, mesh, dim, parts=1):
    """A wrong range of words on the second shard."""
    wrong = parameter.detach().clone()
    wrong[WORDS // 2 :] = wrong[WORDS // 2 :].roll(1, 0)
    return split_parameter(nn.Parameter(wrong), mesh, dim, parts)


masked_fill = torch.Tensor.masked_fill


def unmasked(self, mask, value):
    return self if self.is_floating_point() else masked_fill(self, mask, value)


# The samples of these proofs have only words of the first shard.
TIED = TensorGroup("", ("head",), "words", 1, words=WORDS, tied=("head.weight",))
EMBEDDING, HEAD = replace(TIED, columns=(), tied=()), replace(TIED, row="", tied=())


def identity(x, *_, **__):
    return x


# Each mistake is made while a group is split.
MISTAKES = {
    "none": (TIED, nullcontext()),
    "wrong range": (EMBEDDING, patched(sharded_embedding, split_parameter=shifted)),
    "no mask": (EMBEDDING, patched(torch.Tensor, masked_fill=unmasked)),
    "no sum": (TIED, patched(sharded_embedding, sum_over_shards=identity)),
    "untied": (replace(TIED, tied=()), nullcontext()),
    "rows of the head": (HEAD, patched(sharded_layers, ColwiseParallel=RowwiseParallel)),
    "logits not gathered": (
        HEAD,
        patched(sharded_layers, ColwiseParallel=lambda **_: ColwiseParallel()),
    ),
    "no sum of input gradients": (HEAD, patched(functional, all_reduce=identity)),
}


def wrong(name):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    group, mistake = MISTAKES[name]
    model = Language(tied=group is not HEAD)
    perturb(model)
    inputs = torch.randint(WORDS // 2, (2, 4), generator=torch.Generator().manual_seed(0))
    calls = record_calls(model, inputs, group.layers)
    with mistake:
        result = prove_vocabulary(model, group, calls, DeviceMesh("cpu", [0, 1]))
    torch.set_default_dtype(torch.float32)
    return asdict(result)


def unknown_word():
    """A word that no shard has."""
    torch.manual_seed(0)
    embedding = nn.Embedding(WORDS, WIDTH)
    sharded_embedding.EmbeddingParallel()._apply(embedding, DeviceMesh("cpu", [0, 1]))
    try:
        embedding(torch.tensor([WORDS]))
    except RuntimeError as error:
        return str(error)
    return None


def results():
    plans = {name: plan_of(name, **options) for name, options in MODELS.items()}
    mistakes = {name: wrong(name) for name in MISTAKES}
    return {"plans": plans, "mistakes": mistakes, "unknown word": unknown_word()}
