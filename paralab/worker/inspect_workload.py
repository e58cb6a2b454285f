"""What only a process with torch can tell: the machine's devices, and a workload in plain numbers.

python -m paralab.worker.inspect_workload ANSWER.json QUESTION-AS-JSON
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as in a rank: torch is loaded in two thirds of the time

import inspect
import itertools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from paralab.errors import UsageError
from paralab.machine.host import Gpu, Machine, cpu_name, memory_bytes, usable_cores
from paralab.machine.signals import leave_to_the_launcher
from paralab.worker.optimizer import make_optimizer, make_scheduler
from paralab.worker.parent_watch import end_with_the_parent
from paralab.worker.samples import dataset_samples, rank_batches
from paralab.workload.batch import map_tensors, take, tensors, unpack
from paralab.workload.layers import find_layers
from paralab.workload.load import load_workload, their_lines
from paralab.workload.randomness import seed_everything
from paralab.workload.reference import user_folder
from paralab.workload.shard_units import find_units
from paralab.workload.state import put_back, state_of
from paralab.workload.summary import Summary, controls
from paralab.workload.trial_steps import MOST_BRANCHES, Trial, split_problem, try_step
from paralab.workload.workload import Workload


def main() -> NoReturn:
    leave_to_the_launcher()
    end_with_the_parent()
    answer, question = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        found: dict[str, Any] = {"machine": asdict(look_at_machine())}
        if question.get("workload"):
            found["summary"] = asdict(look_at_workload(**question))
    except UsageError as error:
        found = {"error": {"problem": error.problem, "fix": error.fix, "detail": error.detail}}
    answer.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # at once: the thread that watches the parent never ends by itself


def look_at_machine() -> Machine:
    gpus = []
    reason = None
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    else:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                Gpu(properties.name, properties.total_memory, (properties.major, properties.minor))
            )
    backends = [
        name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)
    ]
    return Machine(
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        cpu=cpu_name(),
        system=sys.platform,
        python=sys.version.split()[0],
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpus=tuple(gpus),
        backends=tuple(backends),
        no_gpu_reason=reason,
    )


def look_at_workload(
    workload: str,
    device: str,
    layers: bool,
    samples: int | None,
    threads: int | None,
    units: bool = False,
    proof: bool = False,
) -> Summary:
    """Build the workload once, run it once on a few samples, and tell what a plan must know."""
    _keep_the_compiler_out()
    loaded = load_workload(workload)
    gc.freeze()
    gc.enable()
    seed_everything(0)
    own_folder = user_folder(workload)
    model = _guarded("model()", own_folder, loaded.model)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model() of {loaded.name} returned {type(model).__name__}, not an nn.Module.",
            fix="return an nn.Module",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"The model of {loaded.name} has no trainable parameter.", fix="a model with parameters"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            f"The model of {loaded.name} has lazy modules, whose parameters do not exist before the first forward.",
            fix="call the model once on a sample inside model(), and return it",
        )
    if threads:
        torch.set_num_threads(threads)
    use = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        use = "cpu"  # the plan refuses it, with the reason
    model = model.to(use).train()
    some = samples or loaded.batch_size
    batch = _guarded("data", own_folder, lambda: _first_batch(loaded, some))

    def to_device(tree: Any) -> Any:
        return map_tensors(lambda t: t.to(use), tree)

    batch = to_device(batch)
    inputs, targets = (loaded.unpack or unpack)(batch)
    trial: Trial = _guarded(
        "A trial step",
        own_folder,
        lambda: try_step(
            loaded, model, batch, lambda: to_device(_first_batch(loaded, MOST_BRANCHES))
        ),
    )
    found, reason = (), None
    if layers:
        state = state_of(model)

        def begin() -> None:
            put_back(model, state)
            seed_everything(0)

        found, reason = _guarded(
            "forward",
            own_folder,
            lambda: find_layers(
                model,
                inputs,
                lambda out: loaded.loss(out, targets),
                loaded.split_points,
                trial.sometimes,
                begin,
            ),
        )
        begin()
    optimizer = _guarded("optimizer", own_folder, lambda: make_optimizer(loaded, model))
    _guarded("scheduler", own_folder, lambda: make_scheduler(loaded, optimizer))
    parameters = list(model.parameters())
    units_found = (
        find_units(model, (loaded.unpack or unpack)(take(batch, 0, 2))[0]) if units else ()
    )
    kinds = controls(trial.batch_norms, trial.random, trial.state)
    return Summary(
        name=loaded.name,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        samples=dataset_samples(loaded),
        batch_size=loaded.batch_size,
        data_path=loaded.data_path,
        weighted=loaded.weight is not None,
        optimizer=type(optimizer).__name__,
        batch_norms=trial.batch_norms,
        dropout=trial.dropout,
        random=trial.random,
        state=trial.state,
        flops_per_sample=trial.flops_per_sample,
        unused=trial.unused,
        sparse=trial.sparse,
        sometimes=trial.sometimes,
        scalar_output=trial.scalar,
        layers=found,
        uncut_reason=reason,
        units=units_found,
        scalars=tuple(name for name, parameter in model.named_parameters() if not parameter.ndim),
        optimizer_bytes_per_byte=_optimizer_state(loaded) if layers else None,
        whole_tensors=_steps_differ(loaded, rows=True) if units else False,
        whole_model=_steps_differ(loaded, rows=False) if layers else False,
        split_problem=_guarded(
            "A trial step", own_folder, lambda: split_problem(loaded, model, batch, kinds)
        )
        if proof
        else None,
    )


def _keep_the_compiler_out() -> None:
    """Optimizers and the counter of operations load torch.compile, which takes a second, only to
    say that nothing is to be compiled there; here nothing is compiled anyway. (Where torch does it
    otherwise, looking is a second slower, no more.)"""
    counter: Any = getattr(flop_counter, "_FlopCounterMode", FlopCounterMode)
    for method in (torch.optim.Optimizer.add_param_group, counter.__torch_dispatch__):
        if function := getattr(method, "__wrapped__", None):
            setattr(function, "__dynamo_disable", function)


def _optimizer_state(workload: Workload) -> float | None:
    """Bytes that the optimizer keeps per byte of parameters, from a step on a small matrix: SGD 0,
    with momentum 1, Adam 2."""
    matrix = nn.Linear(64, 64, bias=False)
    matrix.weight.grad = torch.ones_like(matrix.weight)
    try:
        optimizer = make_optimizer(workload, matrix)
        _step(optimizer)
    except Exception:  # an optimizer that asks more of its parameters: then it is not known
        return None
    kept = sum(t.nbytes for state in optimizer.state.values() for t in tensors(state) if t.ndim)
    return kept / matrix.weight.nbytes


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer) -> None:
    inspect.unwrap(type(optimizer).step)(optimizer)  # what is wrapped around it loads torch.compile


def _steps_differ(workload: Workload, rows: bool) -> bool:
    """Does the optimizer's step on an element depend on other elements?

    rows=True    on the rest of its parameter: do two halves step differently from the whole (Adafactor, Muon)?
    rows=False   on other parameters: does a second one change the step (a clipped global norm)?
    """
    torch.manual_seed(0)
    start, slope = torch.randn(8, 8), torch.randn(8, 8)

    def stepped(pieces: list[torch.Tensor], slopes: list[torch.Tensor]) -> list[torch.Tensor]:
        holder = nn.ParameterList([nn.Parameter(piece.clone()) for piece in pieces])
        optimizer = make_optimizer(workload, holder)
        for _ in range(2):
            for parameter, slope in zip(holder, slopes, strict=True):
                parameter.grad = slope.clone()
            _step(optimizer)
        return [parameter.detach() for parameter in holder]

    try:
        for scale in (1e-3, 1.0, 1e3):
            tilted = slope * scale
            [alone] = stepped([start], [tilted])
            if rows:
                other = torch.cat(stepped(list(start.chunk(2)), list(tilted.chunk(2))))
            else:
                other = stepped([start, start], [tilted, 10.0 * tilted])[0]
            if not torch.allclose(alone, other, rtol=1e-4, atol=1e-7):
                return True
    except Exception:  # an optimizer that asks more of its parameters: then it is not known
        return False
    return False


def _first_batch(workload: Workload, samples: int) -> Any:
    has = dataset_samples(workload)
    if has == 0:
        raise UsageError(f"The data of {workload.name} has no samples.", fix="at least one sample")
    some = min(samples, has) if has else samples
    sequence = rank_batches(
        workload,
        lambda batch: (0, batch.size),
        batch_size=some,
        samples=has,
        steps=1,
        epochs=None,
        seed=0,
    )
    return next(itertools.islice(sequence, 1))[1]


def _guarded(what: str, folder: Path, call: Any) -> Any:
    """Run the user's code; what it raises is shown as theirs."""
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} of the workload failed with {type(error).__name__}: {error}",
            detail=their_lines(error, folder),
        ) from error


if __name__ == "__main__":
    main()
