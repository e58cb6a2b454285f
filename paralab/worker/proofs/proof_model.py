"""The model and samples for proving a plan, in fp64 and with noise in all parameters."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paralab.plan.batches import GlobalBatch
from paralab.worker.proofs.block_proof import perturb
from paralab.worker.samples import dataset_samples, rank_batches
from paralab.workload.batch import call_model, copied, num_samples, take, unpack
from paralab.workload.batch_split_trial import find_casts
from paralab.workload.fp64 import batch_in_fp64, model_in_fp64
from paralab.workload.hooks import Intercepting, watched
from paralab.workload.randomness import seed_everything
from paralab.workload.state import restored
from paralab.workload.workload import Workload

SAMPLES = 2
BRANCH_SECONDS = 2.0  # CPU time for finding samples that take different branches
MOST_BRANCHES = 64  # samples to try
MOST_PROVED = 4  # branches


class ProofModel(NamedTuple):
    """`casts` lists the controls (`verify_controls`) that keep the model from leaving fp64."""

    model: nn.Module
    inputs: Any
    batch: Any
    casts: list[str]


def load_for_proof(workload: Workload, samples: int = SAMPLES) -> ProofModel:
    torch.set_default_dtype(torch.float64)
    seed_everything(0)
    model = model_in_fp64(workload.model()).train()
    perturb(model)
    batch = load_samples(workload, samples)
    inputs, _ = (workload.unpack or unpack)(batch)
    return ProofModel(model, inputs, batch, ["casts"] * find_casts(workload, model, batch))


def load_samples(workload: Workload, most: int = SAMPLES) -> Any:
    size = dataset_samples(workload)
    first = GlobalBatch(step=0, epoch=0, first=0, size=min(most, size or most))
    _, batch = next(rank_batches(workload, [first], samples=size))
    return batch_in_fp64(batch)


def find_other_branches(workload: Workload, model: nn.Module, batch: Any) -> list[Any]:
    """Return single samples for which the model calls different submodules or operators than
    for `batch`. All ranks use those that rank 0 finds, because the search has a time limit."""
    split = workload.unpack or unpack
    samples = load_samples(workload, MOST_BRANCHES)
    deadline = time.process_time() + BRANCH_SECONDS  # a busy machine does not shorten it

    def called(batch: Any) -> frozenset[Any]:
        names: set[Any] = set()

        def note(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            # A branch may differ only in a factor: 0.5 * x or 2.0 * x.
            names.add((func, *(each for each in args if isinstance(each, float))))
            return func(*args, **kwargs)

        seed_everything(0)
        inputs, targets = split(copied(batch))
        with restored(model), watched(model, enter=lambda n, _: names.add(n)):
            with Intercepting(note):
                workload.loss(call_model(model, inputs), targets)
        return frozenset(names)

    branches = {called(batch)}
    found: list[int] = []
    for number in range(num_samples(split(samples)[0])):
        if dist.get_rank() or time.process_time() > deadline or len(found) == MOST_PROVED:
            break
        with suppress(Exception):  # the model may reject a single sample
            branch = called(take(samples, number, number + 1))
            found += [number] * (branch not in branches)
            branches.add(branch)
    chosen = [found]
    dist.broadcast_object_list(chosen)
    return [take(samples, number, number + 1) for number in chosen[0]]
