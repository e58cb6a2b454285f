"""What only a process with torch can tell: the machine's devices, and a workload in plain numbers.

python -m paralab.worker.inspection ANSWER.json QUESTION-AS-JSON
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from paralab.errors import UsageError
from paralab.machine.host import Gpu, Machine, cpu_name, memory_bytes, usable_cores
from paralab.signals import leave_to_the_launcher
from paralab.worker.lifeline import end_with_the_parent
from paralab.worker.optimizer import make_optimizer
from paralab.worker.stream import dataset_samples, rank_batches
from paralab.workload.batch import call_model, map_tensors, num_samples, take, tensors, unpack
from paralab.workload.layers import find_layers
from paralab.workload.load import load_workload, their_lines
from paralab.workload.randomness import seed_everything, without_dropout
from paralab.workload.reference import user_folder
from paralab.workload.summary import Summary
from paralab.workload.units import find_units
from paralab.workload.workload import Workload

NORMS = (nn.modules.batchnorm._BatchNorm,)


def main() -> NoReturn:
    leave_to_the_launcher()
    end_with_the_parent()
    answer, question = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        found: dict[str, Any] = {"machine": asdict(look_at_machine())}
        if question.get("workload"):
            found["summary"] = asdict(look_at_workload(**question))
    except UsageError as error:
        found = {"error": {"problem": error.problem, "cure": error.cure, "detail": error.detail}}
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
            gpus.append(Gpu(properties.name, properties.total_memory, (properties.major, properties.minor)))
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
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
    workload: str, device: str, layers: bool, samples: int | None, threads: int | None, units: bool = False
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
        raise UsageError(f"model() of {loaded.name} returned {type(model).__name__}, not an nn.Module.", cure="return an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"The model of {loaded.name} has no trainable parameter.", cure="a model with parameters")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            f"The model of {loaded.name} has lazy modules, whose parameters do not exist before the first forward.",
            cure="call the model once on a sample inside model(), and return it",
        )
    if threads:
        torch.set_num_threads(threads)
    use = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        use = "cpu"  # the plan refuses it, with the reason
    model = model.to(use).train()
    some = samples or loaded.batch_size
    batch = _guarded("data", own_folder, lambda: _first_batch(loaded, some))
    batch = map_tensors(lambda t: t.to(use), batch)
    inputs, targets = (loaded.unpack or unpack)(batch)
    trial = _guarded("A trial step", own_folder, lambda: _trial_step(loaded, model, batch))
    found, reason = (), None
    if layers:
        found, reason = _guarded(
            "forward", own_folder, lambda: find_layers(model, inputs, lambda out: loaded.loss(out, targets), loaded.split_points)
        )
    optimizer = make_optimizer(loaded, model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS calls the model several times per step, which no strategy can spread.", cure="another optimizer")
    parameters = list(model.parameters())
    return Summary(
        name=loaded.name,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        samples=dataset_samples(loaded),
        batch_size=loaded.batch_size,
        data_path=loaded.data_path,
        weighted=loaded.weight is not None,
        optimizer=type(optimizer).__name__,
        batch_norms=sum(isinstance(module, NORMS) for module in model.modules()),
        dropout=trial.dropout,
        random=trial.random,
        flops_per_sample=trial.flops_per_sample,
        unused=trial.unused,
        layers=found,
        uncut_reason=reason,
        units=find_units(model, (loaded.unpack or unpack)(take(batch, 0, 2))[0]) if units else (),
        scalars=tuple(name for name, parameter in model.named_parameters() if not parameter.ndim),
        optimizer_bytes_per_byte=_optimizer_state(loaded) if layers else None,
    )


def _keep_the_compiler_out() -> None:
    """Optimisers and the counter of operations load torch.compile, which takes a second, only to say that nothing is to be compiled
    there; here nothing is compiled anyway. (Where torch does it otherwise, looking is a second slower, no more.)"""
    counter: Any = getattr(flop_counter, "_FlopCounterMode", FlopCounterMode)
    for method in (torch.optim.Optimizer.add_param_group, counter.__torch_dispatch__):
        if function := getattr(method, "__wrapped__", None):
            setattr(function, "__dynamo_disable", function)


def _optimizer_state(workload: Workload) -> float | None:
    """Bytes that the optimiser keeps per byte of parameters, from a step on a small matrix: SGD 0, with momentum 1, Adam 2."""
    matrix = nn.Linear(64, 64, bias=False)
    matrix.weight.grad = torch.ones_like(matrix.weight)
    try:
        optimizer = make_optimizer(workload, matrix)
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer)  # what is wrapped around it loads torch.compile
    except Exception:  # an optimiser that asks more of its parameters: then it is not known
        return None
    kept = sum(t.nbytes for state in optimizer.state.values() for t in tensors(state) if t.ndim)
    return kept / matrix.weight.nbytes


def _first_batch(workload: Workload, samples: int) -> Any:
    has = dataset_samples(workload)
    if has == 0:
        raise UsageError(f"The data of {workload.name} has no samples.", cure="at least one sample")
    some = min(samples, has) if has else samples
    sequence = rank_batches(workload, lambda batch: (0, batch.size), batch_size=some, samples=has, steps=1, epochs=None, seed=0)
    return next(itertools.islice(sequence, 1))[1]


@dataclass(frozen=True)
class Trial:
    unused: tuple[str, ...]
    flops_per_sample: float | None
    dropout: bool
    random: bool


def _trial_step(workload: Workload, model: nn.Module, batch: Any) -> Trial:
    """Forward and backward on two samples: mistakes show before anything is started, and so do parameters without a gradient and
    a forward that draws random numbers."""
    inputs, targets = (workload.unpack or unpack)(take(batch, 0, 2))

    def loss_with(seed: int) -> Any:
        torch.manual_seed(seed)
        return workload.loss(call_model(model, inputs), targets)

    counter = FlopCounterMode(display=False)
    # The counter does not know a CPU's fused attention; as plain matrix products it does.
    with counter, sdpa_kernel(SDPBackend.MATH):
        loss = loss_with(0)
        if isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad:
            loss.backward()
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) and loss.ndim else f"{loss!r:.60}"
        raise UsageError(
            f"loss(output, target) of {workload.name} returned {what}, not one number that depends on the model.",
            cure="a mean, e.g. torch.nn.functional.cross_entropy(output, target)",
        )
    samples = num_samples(inputs)
    unused = tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        draws = not torch.equal(loss_with(1), loss_with(2))
        with without_dropout(model):
            random = draws and not torch.equal(loss_with(1), loss_with(2))
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())  # whose operators the counter does not know
    flops = None if recurrent else counter.get_total_flops() / samples or None
    return Trial(unused, flops, dropout=draws and not random, random=random)


def _guarded(what: str, folder: Path, call: Any) -> Any:
    """Run the user's code; what it raises is shown as theirs."""
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} of the workload failed with {type(error).__name__}: {error}", detail=their_lines(error, folder)
        ) from error


if __name__ == "__main__":
    main()
