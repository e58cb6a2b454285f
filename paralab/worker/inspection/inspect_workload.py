"""Run the inspections that require torch: list the machine's devices, and summarize a workload in
plain numbers.

python -m paralab.worker.inspection.inspect_workload ANSWER.json INSPECTION.json
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # this saves a third of torch's import time, as in a rank

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from paralab.errors import NO_MEMORY, UsageError
from paralab.machine.host import Gpu, Machine, cpu_name, memory_bytes, usable_cores
from paralab.plan.batches import LESS, GlobalBatch
from paralab.worker.inspection.answers import answer
from paralab.worker.inspection.too_large import fake_if_too_large
from paralab.worker.optimizer import (
    chooses_by_position,
    make_optimizer,
    make_scheduler,
    mixes_parameters,
    mixes_rows,
    state_bytes_per_byte,
)
from paralab.worker.samples import dataset_samples, rank_batches
from paralab.workload.batch import call_model, copied, map_tensors, num_samples, take, unpack
from paralab.workload.batch_split_trial import find_casts, find_split_problem
from paralab.workload.cut_points import find_layers
from paralab.workload.expert_layers import stacked_experts
from paralab.workload.hooks import Intercepting
from paralab.workload.load import load_workload, user_code
from paralab.workload.randomness import seed_everything
from paralab.workload.reference import user_folder
from paralab.workload.repeated_blocks import StepResult, find_blocks
from paralab.workload.shard_units import find_units
from paralab.workload.state import put_back, state_of
from paralab.workload.summary import Block, Inspection, Summary, Trial
from paralab.workload.trial_steps import MOST_BRANCHES, OUTSIDE, try_step
from paralab.workload.workload import Workload

ENOUGH = 32  # samples to test whether a batch can be split
Details = dict[str, Any]  # fields of `Summary` that not every inspection needs


def _reply(question: dict[str, Any] | None) -> dict[str, Any]:
    try:
        reply = {"machine": asdict(inspect_machine())}
        if question:
            reply["summary"] = asdict(inspect_workload(Inspection(**question)))
    except UsageError as error:
        reply = {"error": {"problem": error.problem, "fix": error.fix, "detail": error.detail}}
    return reply


def inspect_machine() -> Machine:
    number, reason = torch.cuda.device_count() if torch.cuda.is_available() else 0, None
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    elif not number:
        reason = "torch sees no CUDA device"
    gpus = [torch.cuda.get_device_properties(index) for index in range(number)]
    known = ("gloo", "nccl") if dist.is_available() else ()
    return Machine(
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        cpu=cpu_name(),
        system=sys.platform,
        python=sys.version.split()[0],
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpus=tuple(Gpu(gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in gpus),
        backends=(
            *(name for name in known if dist.is_backend_available(name)),
            *(("local",) if known and sys.platform == "linux" else ()),
        ),
        no_gpu_reason=reason,
        nccl=torch.cuda.nccl.version() if number and dist.is_nccl_available() else (),
    )


def inspect_workload(inspection: Inspection) -> Summary:
    """Build the workload, run it on a few samples, and return the facts that a plan needs."""
    skip_compiler_import()
    workload = load_workload(inspection.workload)
    gc.freeze()
    gc.enable()
    return _Inspector(inspection, workload).summarize()


class _Inspector:
    """A workload with its model and a batch on the device."""

    def __init__(self, asked: Inspection, workload: Workload) -> None:
        self.asked, self.workload = asked, workload
        # Without a GPU, use the CPU. The plan will reject `--device cuda` and say why.
        wants_gpu = asked.device in ("cuda", "auto")
        self.device = "cuda" if wants_gpu and torch.cuda.is_available() else "cpu"
        self.fake = fake_if_too_large(workload, self.device) if asked.large else None
        self.around: AbstractContextManager[Any] = self.fake or nullcontext()
        seed_everything(0)

        with self.running("model()"), self.around:
            self.model = _build_model(workload).train()
        if asked.threads:
            torch.set_num_threads(asked.threads)
        if not self.fake:
            self.model = self.model.to(self.device)
        with self.running("data"):
            self.size = dataset_samples(workload)
            if self.size == 0:
                problem = f"The data of {workload.name} has no samples."
                raise UsageError(problem, fix="at least one sample")
            self.batch = self.load(asked.samples or workload.batch_size)

    def running(self, what: str) -> AbstractContextManager[None]:
        return user_code(f"{what} of the workload failed with", user_folder(self.asked.workload))

    def load(self, samples: int) -> Any:
        size = self.size
        first = GlobalBatch(step=0, epoch=0, first=0, size=min(samples, size or samples))
        _, batch = next(rank_batches(self.workload, [first], samples=size))
        return map_tensors(
            self.fake.from_tensor if self.fake else lambda t: t.to(self.device), batch
        )

    def summarize(self) -> Summary:
        workload, model, fake = self.workload, self.model, self.fake

        def branches() -> Any:
            return self.batch if fake else self.load(MOST_BRANCHES)

        with self.running("A trial step"), self.around:
            trial = try_step(workload, model, self.batch, branches, not fake)
        with self.running("optimizer"), self.around:
            optimizer = make_optimizer(workload, model)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with self.running("scheduler"):
            make_scheduler(workload, optimizer)
        named = dict(model.named_parameters())
        facts = Summary(
            name=workload.name,
            parameters=sum(p.numel() for p in named.values()),
            parameter_bytes=sum(p.nbytes for p in named.values()),
            samples=self.size,
            batch_size=workload.batch_size,
            dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            data_path=workload.data_path,
            weighted=workload.weight is not None,
            optimizer=type(optimizer).__name__,
            too_large=fake is not None,
            experts=stacked_experts(model),
            scalars=tuple(name for name, p in named.items() if not p.ndim),
            imaginary=tuple(name for name, p in named.items() if p.is_complex()),
            **vars(trial),
        )
        return replace(facts, **self.details(trial))

    def details(self, trial: Trial) -> Details:
        """Return the fields of `Summary` that only some strategies need."""
        asked, workload, model = self.asked, self.workload, self.model
        details: Details = {}
        if asked.layers:
            with self.running("forward"):
                details |= self.layers(trial)
            details["by_position"] = chooses_by_position(workload, model)
        if asked.units:
            inputs, _ = (workload.unpack or unpack)(take(self.batch, 0, 2))
            with self.around:
                units = find_units(model, inputs)
            details |= {"units": units, "whole_tensors": mixes_rows(workload)}
        if asked.layers or asked.units:
            details["whole_model"] = mixes_parameters(workload)
        if asked.blocks:
            with self.running("A trial step"):
                details["blocks"] = _inspect_blocks(workload, model, take(self.batch, 0, 2))
        if asked.verify:  # this is last because it changes the model's dtype
            with self.running("A trial step"):
                details |= self.splits(trial)
        return details

    def layers(self, trial: Trial) -> Details:
        """Return the fields that only a strategy with stages needs."""
        workload = self.workload
        inputs, targets = (workload.unpack or unpack)(self.batch)

        def loss(output: Any) -> torch.Tensor:
            return workload.loss(output, targets)

        with self.around:
            layers, reason = find_layers(
                self.model, inputs, loss, workload.split_points, trial.sometimes
            )
        if self.fake:  # the trial computed nothing
            layers = tuple(replace(layer, seconds=0.0) for layer in layers)
        return {
            "layers": layers,
            "uncut_reason": reason,
            "optimizer_bytes_per_byte": state_bytes_per_byte(workload),
        }

    def splits(self, trial: Trial) -> Details:
        """Return why a batch cannot be split, and the casts that `verify` must know about. In fp64,
        a batch needs more memory than in training, so a part of it may have to do."""
        samples = num_samples((self.workload.unpack or unpack)(self.batch)[0])
        for part in (samples, min(samples, max(4, samples // LESS))):
            try:
                whole = part == samples
                return self._splits_of(trial, self.batch if whole else take(self.batch, 0, part))
            except Exception as error:
                if not any(word in f"{type(error).__name__}: {error}" for word in NO_MEMORY):
                    raise
        return {}  # not checked

    def _splits_of(self, trial: Trial, batch: Any) -> Details:
        workload, model = self.workload, self.model
        casts = find_casts(workload, model, batch)
        if OUTSIDE in trial.state:  # verification cannot restore it, so samples would seem to mix
            changing = f"each forward pass changes {OUTSIDE} (such as a global), and then uses it"
            return {"casts": casts, "split_problem": changing}
        started = time.perf_counter()
        problem = find_split_problem(workload, model, batch, trial.controls)
        # A small batch may lack the rare samples that reveal a problem, so try a larger one.
        # But do not repeat this if the model draws random numbers or has state: the first call has
        # already replaced its forward.
        quick = time.perf_counter() - started < 1.0 and batch is self.batch
        again = quick and not (trial.random or trial.state)
        if not problem and again and workload.batch_size < ENOUGH:
            problem = find_split_problem(workload, model, self.load(ENOUGH), trial.controls)
        return {"casts": casts, "split_problem": problem}


def _inspect_blocks(workload: Workload, model: nn.Module, samples: Any) -> tuple[Block, ...]:
    before = state_of(model)

    def train() -> StepResult:
        put_back(model, before)
        seed_everything(0)
        inputs, targets = (workload.unpack or unpack)(copied(samples))
        workload.loss(call_model(model, inputs), targets).backward()
        gradients = {
            n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None
        }
        model.zero_grad(set_to_none=True)
        return StepResult(gradients, state_of(model))

    blocks = find_blocks(model, train)
    put_back(model, before)
    return blocks


def _build_model(workload: Workload) -> nn.Module:
    model: Any = workload.model()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model() of {workload.name} returned {type(model).__name__}, not an nn.Module.",
            fix="return an nn.Module",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"The model of {workload.name} has no trainable parameters.",
            fix="a model with parameters",
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            f"The model of {workload.name} has lazy modules, whose parameters do not exist until "
            "the first forward pass.",
            fix="call the model once on a sample inside model(), and return it",
        )
    return model


def skip_compiler_import() -> None:
    """Prevent torch from importing its compiler, which takes a second. Optimizers and dispatch modes
    import it only to mark functions as not compilable, but inspections compile nothing.
    If this has no effect in a different torch version, an inspection takes a second longer."""
    counter: Any = getattr(flop_counter, "_FlopCounterMode", FlopCounterMode)
    modes = counter.__torch_dispatch__, Intercepting.__torch_dispatch__
    for method in (torch.optim.Optimizer.add_param_group, *modes):
        if function := getattr(method, "__wrapped__", None):
            setattr(function, "__dynamo_disable", function)


main = partial(answer, _reply)

if __name__ == "__main__":
    main()
