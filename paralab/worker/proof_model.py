"""The model and samples for proving a plan, in fp64 and with noise in all parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from paralab.plan.batches import GlobalBatch
from paralab.worker.block_proof import perturb
from paralab.worker.samples import dataset_samples, rank_batches
from paralab.workload.batch import unpack
from paralab.workload.batch_split_trial import find_casts
from paralab.workload.fp64 import batch_in_fp64, model_in_fp64
from paralab.workload.randomness import seed_everything
from paralab.workload.workload import Workload

SAMPLES = 2


class ProofModel(NamedTuple):
    """`casts` lists the controls (`verify_controls`) that keep the model from leaving fp64."""

    model: nn.Module
    inputs: Any
    batch: Any
    casts: list[str]


def load_for_proof(workload: Workload) -> ProofModel:
    torch.set_default_dtype(torch.float64)
    seed_everything(0)
    model = model_in_fp64(workload.model()).train()
    perturb(model)
    batch = load_samples(workload)
    inputs, _ = (workload.unpack or unpack)(batch)
    return ProofModel(model, inputs, batch, ["casts"] * find_casts(workload, model, batch))


def load_samples(workload: Workload) -> Any:
    size = dataset_samples(workload)
    first = GlobalBatch(step=0, epoch=0, first=0, size=min(SAMPLES, size or SAMPLES))
    _, batch = next(rank_batches(workload, [first], samples=size))
    return batch_in_fp64(batch)
