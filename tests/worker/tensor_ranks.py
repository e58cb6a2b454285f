"""Run this on two ranks: it tries to prove the plans of all model families, and wrong groups in
some models. Rank 0 prints the results as JSON.

    python -S tests/forked.py 2 tests/worker/tensor_ranks.py
"""

import copy
import json
import logging
import math
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from docs import families
from paralab.errors import ParalabError
from paralab.plan.tensor_plan import parallelize_code
from paralab.worker.groups import broadcast_model
from paralab.worker.proofs import block_proof
from paralab.worker.proofs.block_proof import begin_together
from paralab.worker.proofs.model_proof import _gradients
from paralab.worker.proofs.proof_model import load_samples
from paralab.worker.proofs.prove_shards import find_tensor_plan
from paralab.worker.proofs.prove_tokens import find_token_plan
from paralab.worker.sharding import split_layers, split_tensors
from paralab.worker.sharding.sequence_parts import Ranks
from paralab.worker.sharding.sharded_layers import shard_group
from paralab.worker.sharding.shards import local
from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.workload.batch import unpack
from paralab.workload.hooks import patched
from paralab.workload.linear_layers import record_calls
from paralab.workload.load import load_workload
from paralab.workload.sequence_plan import SplitBlock
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import as_workload
from tests.worker import sequence_models, vocabulary_models

SEQUENCES = ("llama_gqa", "gpt2", "bert", "vit", "t5", "encoder", "transformer", "gpt:tiny")
TOKENS = ("llama_gqa", "gpt2", "opt", "bert", "encoder", "gpt:tiny")


def swap(group):
    """A wrong group: rows instead of columns, and columns instead of rows."""
    [column] = group.columns
    return replace(group, columns=(group.row,), row=column)


def prove_wrongly(workload, group):
    """Prove one group of a workload's model, without `prove`'s second attempt."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = workload.model().double().train()
    block_proof.perturb(model)
    inputs, _ = (workload.unpack or unpack)(load_samples(workload))
    calls = record_calls(model, inputs, [group.block])[group.block]
    block = model.get_submodule(group.block)
    reference = block_proof.run_block(block, calls)
    mesh = DeviceMesh("cpu", [0, 1])
    result, _ = block_proof._try(block, calls, reference, group, mesh)
    torch.set_default_dtype(torch.float32)
    return asdict(result)


def wrong_groups():
    gpt, mlp = load_workload("gpt:tiny"), load_workload("mlp:tiny")
    fused, forward = families.prove("gpt:tiny").kept[:2]
    first = families.prove("mlp:tiny").kept[0]
    results = {
        "right": prove_wrongly(gpt, fused),
        "swapped": prove_wrongly(gpt, swap(forward)),
        "one matrix": prove_wrongly(gpt, replace(fused, parts=1)),
        "wrong row": prove_wrongly(mlp, replace(first, row="4")),
    }
    with patched(split_tensors, sum_over_shards=lambda x, mesh: x):
        results["right again"] = prove_wrongly(gpt, fused)  # its row is torch's own
    with patched(split_tensors, copy_to_shards=lambda x, mesh: x):
        results["no sum of input gradients"] = prove_wrongly(gpt, fused)
    return results


def wrong_hugging_face_groups():
    gpt2 = as_workload(families.gpt2(), "gpt2")
    qwen3 = as_workload(families.qwen3(), "qwen3")
    attention, heads = families.prove("gpt2").kept[0], families.prove("qwen3").kept[0]
    results = {
        "undivided": prove_wrongly(gpt2, replace(attention, divided=())),
        "unsummed": prove_wrongly(qwen3, replace(heads, summed=())),
    }
    with patched(split_tensors, sum_over_shards=lambda x, mesh: x):
        results["no sum of rows"] = prove_wrongly(gpt2, attention)
    return results


def token_plan(name="gpt:tiny"):
    plan = find_token_plan(families.load_family(name), families.prove(name))
    torch.set_default_dtype(torch.float32)
    return asdict(plan)


def joined_lengths():
    """Call a module with a part of 12 tokens, and with another sequence that is as long as the
    part."""

    class Cross(nn.Module):
        def forward(self, x, memory, again):
            self.lengths = [each.shape[1] for each in (x, memory, again)]
            return x

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross = Cross()

        def forward(self, x, memory):
            return self.cross(x, memory, x)

    block = Layer()
    split = SplitBlock("", (2,), cut=((0, 1),), joined=("cross",))
    SplitSequence(block, (split,), None, begin_together, begin_together)
    block(torch.randn(2, 12, 8), torch.randn(2, 6, 8))
    return block.cross.lengths


def wrong_token_plans():
    results = {"right": token_plan()}
    with patched(Ranks, reduce=lambda self, whole, dim, unit: self.own_part(whole, dim)):
        results["no sum of rows"] = token_plan()
    with patched(Ranks, join=Ranks.gather):
        results["no sum of input gradients"] = token_plan()
    with patched(SplitSequence, sum_gradients=lambda self: None):
        results["no sum of gradients"] = token_plan()
    with patched(SplitSequence, _join=lambda self, arguments: arguments):
        results["not joined"] = token_plan()
    return results


def run_code(name):
    """Apply the code that `plan tp` prints to a plain model, and compare its gradients."""
    code = "\n".join(parallelize_code(families.prove(name)))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    workload = as_workload(getattr(families, name)(), name)
    model = workload.model().double().train()
    block_proof.perturb(model)
    sharded = copy.deepcopy(model)
    names = {"model": sharded, "mesh": DeviceMesh("cpu", [0, 1])}
    exec(code, names)
    with controlled(model, ()), ExitStack() as around:
        plain = _gradients(workload, model, load_samples(workload))
        if "# with loss_parallel(), implicit_replication():" in code:
            around.enter_context(names["loss_parallel"]())
            around.enter_context(names["implicit_replication"]())
        errors = block_proof.errors_of(_gradients(workload, sharded, load_samples(workload)), plain)
    torch.set_default_dtype(torch.float32)
    return max(errors.values()), code


def unused():
    """A group whose outputs do not affect the loss."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.c(x + 0 * self.b(self.a(x)))

    data = torch.randn(4, 4)
    workload = {"model": Gated, "data": (data, data), "loss": nn.functional.mse_loss}
    plan = find_tensor_plan(as_workload(workload, "unused"), 2)
    torch.set_default_dtype(torch.float32)
    return plan.problem


class Observer(nn.Module):
    """Its buffer depends on all hidden units, and scales them from the second step on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(4, 8), nn.Linear(8, 4), None
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.seen = self.a(x)
        result = self.b(self.seen / self.scale)
        self.scale = self.seen.detach().square().mean()
        return result


class Branching(nn.Module):
    """For one sample, another layer reads the hidden units."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.rare = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.a(x)
        return self.rare(hidden) if (x > 9).any() else self.b(hidden)


class Doubling(Branching):
    """For one sample, it calls the same layers, but divides by the number of hidden units."""

    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden / hidden.shape[-1] if (x > 9).any() else hidden)


class Reading(Branching):
    """It takes a branch that depends on the mean of all hidden units."""

    def forward(self, x):
        hidden = self.a(x)
        scaled = hidden - 100.0
        return self.b(hidden * 2.0 if scaled.mean() > 0 else hidden)


class ReadingAfter(Branching):
    """Its branch depends on values that all shards have."""

    def forward(self, x):
        result = self.b(self.a(x))
        return result * 2.0 if result.mean() > 0 else result


class Counter(nn.Sequential):
    """Each call changes its state, but that does not depend on the hidden units."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) * self.calls


class InPlace(nn.Module):
    """It changes a row's result in place, outside of the group's block (as Falcon does)."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)]
        self.inside, self.after = nn.Sequential(*layers), nn.Linear(4, 4)

    def forward(self, x):
        result = self.inside(x)
        result += x
        return self.after(result)


def plan_of(model):
    data = torch.randn(4, 4)
    data[3, 0] = 10.0
    workload = {"model": model, "data": (data, data), "loss": nn.functional.mse_loss}
    plan = find_tensor_plan(as_workload(workload, "small"), 2)
    torch.set_default_dtype(torch.float32)
    return asdict(plan)


class Clipped(torch.optim.AdamW):
    """An optimizer whose steps depend on the norm of all gradients together, split or not."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        return super().step(closure)


Adafactor = torch.optim.Adafactor


class OwnNorms(torch.optim.SGD):
    """An optimizer whose steps depend on the norm of this rank's part of each gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                own = local(parameter.grad)
                own /= own.norm()
        return super().step(closure)


def aligned():
    """Add each rank's number to all parameters, and broadcast. Return the second rank's additions
    that are left in a split and a replicated parameter."""
    workload = load_workload("mlp:tiny")
    torch.manual_seed(0)
    model = workload.model()
    for group in families.prove("mlp:tiny").kept[:1]:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("shards",))
        shard_group(model, group, mesh)
    split, replicated = (local(model.get_parameter(f"{n}.weight")) for n in (group.row, "8"))
    before = split.clone(), replicated.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).add_(dist.get_rank())
    broadcast_model(model, dist.group.WORLD)
    left = [
        float((p - old).abs().max()) for p, old in zip((split, replicated), before, strict=True)
    ]
    answers = [None, None]
    dist.all_gather_object(answers, left)
    return answers[1]


def disagreement(mine):
    rank = SimpleNamespace(rank=0, shard=0)
    context = SimpleNamespace(plan=None, probe=SimpleNamespace(step=7), rank=rank)
    try:
        with patched(split_layers, group_along=lambda *_: dist.group.WORLD):
            split_layers.require_agreement(context, torch.tensor(mine))
    except ParalabError as error:
        return error.problem
    return None


def problem_with(optimizer):
    workload = replace(load_workload("mlp:tiny"), optimizer=lambda p: optimizer(p, lr=0.1))
    plan = find_tensor_plan(workload, 2)
    torch.set_default_dtype(torch.float32)
    return plan.problem


SMALL = (Observer, Counter, InPlace, Branching, Doubling, Reading, ReadingAfter)


def main():
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo")
    rows = [families.row_of(name, families.prove(name)) for name in families.FAMILIES]
    wrong = wrong_groups() | wrong_hugging_face_groups()
    code = {name: run_code(name) for name in ("gpt2", "qwen3", "transformer")}
    problems = {each.__name__: problem_with(each) for each in (Clipped, OwnNorms, Adafactor)}
    problems["unused"] = unused()
    left, rank = aligned(), dist.get_rank()
    losses = [disagreement(loss) for loss in (2.0 + 1e-5 * rank, math.nan, 2.0 + 0.01 * rank)]
    small = {each.__name__: plan_of(each) for each in SMALL}
    sequence = {"rows": [families.sequence_row(name) for name in SEQUENCES]}
    sequence["plans"] = sequence_models.results()
    vocabulary = vocabulary_models.results()
    tokens = {"rows": [families.token_row(name) for name in TOKENS], "plans": wrong_token_plans()}
    tokens["joined"] = joined_lengths()
    if dist.get_rank() == 0:
        results = {"rows": rows, "wrong": wrong, "code": code, "problems": problems}
        more = {"small": small, "aligned": left, "losses": losses, "sequence": sequence}
        more |= {"vocabulary": vocabulary, "tokens": tokens}
        print(json.dumps(results | more))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
