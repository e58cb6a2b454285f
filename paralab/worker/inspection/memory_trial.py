"""Run training steps with fake tensors, which have shapes but no data, and count their bytes.

A fake model may be larger than this machine's memory.

python -m paralab.worker.inspection.memory_trial ANSWER.json QUESTIONS.json
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # this saves a third of torch's import time, as in a rank

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paralab.plan.batches import GlobalBatch
from paralab.plan.memory_trial import Kind, MemoryTrial, Pass, Weight, kind_of
from paralab.plan.plan import Plan
from paralab.worker.inspection.answers import answer
from paralab.worker.inspection.fake_ranks import Recomputing, split_model
from paralab.worker.inspection.inspect_workload import skip_compiler_import
from paralab.worker.inspection.saved_tensors import SavedTensors, at_starts
from paralab.worker.measure.memory import num_bytes, stored_bytes
from paralab.worker.optimizer import make_optimizer
from paralab.worker.precision import LOW
from paralab.worker.samples import dataset_samples, rank_batches
from paralab.worker.sharding.shards import gathered, local
from paralab.workload.batch import call_model, map_tensors, resize, take, tensors, unpack
from paralab.workload.hooks import patched
from paralab.workload.load import load_workload
from paralab.workload.randomness import seed_everything
from paralab.workload.recompute import Watched, recompute, watch_nothing, watch_within
from paralab.workload.workload import Workload

MOST_LOADED = 256  # the trial uses the shapes of this many samples
WORKSPACE_DIM = 256  # size of the matrix product that makes CUDA's libraries allocate workspaces


def _reply(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    skip_compiler_import()
    gc.freeze()
    gc.enable()
    known = EarlierTrials({}, {})
    return [_answer(Plan.from_json(each["plan"]), each["sizes"], known) for each in questions]


class EarlierTrials(NamedTuple):
    """Measurements of earlier trials that do not depend on the cuts between stages. They are the
    optimizer's state and temporary tensors, and the peaks of two passes by number of samples."""

    optimizers: dict[Kind, tuple[tuple[Weight, ...], int]]
    peaks: dict[Kind, tuple[int, int]]


def _answer(plan: Plan, sizes: list[int], known: EarlierTrials) -> dict[str, Any]:
    try:
        return {"trial": asdict(run_trial(plan, load_workload(plan.workload), sizes, known))}
    except Exception as error:
        return {"reason": _explain(error)}


def run_trial(
    plan: Plan, workload: Workload, sizes: list[int], known: EarlierTrials | None = None
) -> MemoryTrial:
    """Run a micro-batch of each size through the whole model, and one optimizer step."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    default = torch.get_default_dtype()
    if plan.precision == "fp64":
        torch.set_default_dtype(torch.float64)
    try:
        # A module may use a real tensor that is neither a parameter nor a buffer.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        return _Trial(plan, workload, fake, known or EarlierTrials({}, {})).run(sizes)
    finally:
        torch.set_default_dtype(default)


class _Trial:
    def __init__(self, plan: Plan, workload: Workload, fake: Any, known: EarlierTrials) -> None:
        self.plan, self.workload, self.fake = plan, workload, fake
        self.known, self.kind = known, kind_of(plan)
        self.device = torch.device(plan.device)
        self.low = LOW.get(plan.precision)
        self.by_module = plan.shards_parameters  # FSDP2 casts modules, and does not use autocast
        self.model, self.built = _build(workload, fake, plan.seed)
        self.watch: Callable[[nn.Module], Watched] = watch_nothing
        self.sample = self._load_sample()

    def run(self, sizes: list[int]) -> MemoryTrial:
        self._place(lambda name: torch.float64 if self.plan.precision == "fp64" else None)
        with split_model(self.model, self.plan, self.fake) as recomputing:
            for name in self.plan.recomputed:
                block = self.model.get_submodule(name)
                recompute(block, self.plan.recompute or "", partial(self._watch, recomputing))
            return self._run_steps(sizes)

    def _watch(self, recomputing: Recomputing, block: nn.Module) -> Watched:
        return watch_within(self.watch(block), recomputing(block))

    def _run_steps(self, sizes: list[int]) -> MemoryTrial:
        if self.kind not in self.known.optimizers:
            self.known.optimizers[self.kind] = self._try_optimizer(min(sizes))
        weights, step_bytes = self.known.optimizers[self.kind]
        norms = tuple(
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and [*module.parameters()]
        )
        if self.low and self.by_module:
            self._place(lambda name: None if name in norms else self.low)
        return MemoryTrial(
            weights=weights,
            buffers={name: stored_bytes(each) for name, each in self.model.named_buffers()},
            norms=norms,
            passes=tuple(self._try_pass(size) for size in sizes),
            step_bytes=step_bytes,
            workspace_bytes=_workspace_bytes() if self.device.type == "cuda" else 0,
            built=self.built,
        )

    def _load_sample(self) -> Any:
        """Return one sample as fake tensors with the shapes of a real batch, except for dim 0."""
        size = dataset_samples(self.workload)
        loaded = min(self.plan.batch_size, MOST_LOADED)
        first = GlobalBatch(0, 0, 0, min(loaded, size or loaded))
        _, batch = next(rank_batches(self.workload, [first], samples=size))
        sample = take(batch, 0, 1)

        def empty(real: torch.Tensor) -> torch.Tensor:
            dtype = real.dtype
            if real.is_floating_point():
                low = self.low if self.by_module else None
                dtype = torch.float64 if self.plan.precision == "fp64" else low or dtype
            return torch.empty(real.shape, dtype=dtype, device=self.device)

        with self.fake:
            return map_tensors(empty, sample)

    def _place(self, dtype_in: Callable[[str], torch.dtype | None]) -> None:
        """Replace all parameters and buffers with fake ones on the plan's device. `Module.to` does
        not work with fake tensors. Tied parameters stay tied."""
        placed: dict[int, Any] = {}  # id -> fake tensor

        def place(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
            kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=kind, device=self.device
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(empty, requires_grad=tensor.requires_grad)
            return empty

        with self.fake:
            for name, module in self.model.named_modules():
                for values in (module._parameters, module._buffers):
                    for key, tensor in values.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in placed:
                            # Keep the old tensor, so that no new tensor gets its id.
                            placed[id(tensor)] = place(tensor, dtype_in(name)), tensor
                        values[key] = placed[id(tensor)][0]

    def _forward(
        self, batch: Any, before_loss: Callable[[], None] = lambda: None
    ) -> tuple[Any, torch.Tensor]:
        """Return the output and the loss."""
        inputs, targets = (self.workload.unpack or unpack)(batch)
        with _KnownSizes():  # type: ignore[no-untyped-call]
            output = call_model(self.model, inputs)
        if self.low and self.by_module:  # compute the loss in fp32, as fsdp does
            output = _to_fp32(output)
        before_loss()
        return output, gathered(self.workload.loss(output, targets))

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.low or self.by_module:
            return nullcontext()
        cached = self.device.type == "cuda" or self.plan.micro_batches == 1
        return torch.autocast(self.device.type, self.low, cache_enabled=cached)

    def _try_optimizer(self, samples: int) -> tuple[tuple[Weight, ...], int]:
        """Run optimizer steps. Return each parameter's state and the bytes of temporary tensors."""
        optimizer = make_optimizer(self.workload, self.model)
        if self.device.type == "cuda":
            # torch defaults to foreach on CUDA, but does not recognize fake CUDA tensors.
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        with self.fake:
            batch = resize(self.sample, samples)
            if self.low and self.by_module:  # the modules are not cast yet
                batch = _to_fp32(batch)
            self._forward(batch)[1].backward()
            optimizer.step()  # this step creates the state
            step_bytes = self._peak_of(optimizer.step, optimizer)
            state = {p: list(tensors(dict(values))) for p, values in optimizer.state.items()}
        groups = optimizer.param_groups
        numbers = {p: number for number, group in enumerate(groups) for p in group["params"]}
        weights = []
        for name, each in self.model.named_parameters():
            shard = local(each)
            own = state.get(each, [])
            like = sum(stored_bytes(local(v)) for v in own if v.shape == each.shape)
            weights.append(
                Weight(
                    name=name,
                    rows=max(1, shard.shape[0]) if shard.ndim else 1,
                    elements=shard.numel(),
                    bytes=shard.nbytes,
                    trained=each.requires_grad,
                    gradient_bytes=0 if each.grad is None else stored_bytes(local(each.grad)),
                    state_bytes=like,
                    other_state_bytes=num_bytes(own) - like,
                    group=numbers.get(each),
                    whole=each.numel(),
                )
            )
        self.model.zero_grad(set_to_none=True)
        return tuple(weights), step_bytes

    def _try_pass(self, samples: int) -> Pass:
        def step() -> None:
            with self._autocast():
                output, loss = self._forward(batch)
            loss.backward()
            del output  # a rank also keeps the output until here

        with self.fake:
            batch = resize(self.sample, samples)
            counted, loss, loss_alone = self._count_saved(batch)
            saved = tuple(sum(n for n, _ in part.values()) for part in counted.parts[:-1])
            recomputed = tuple(counted.recomputed[:-1])
            key = self.kind, samples
            if key not in self.known.peaks:
                first = self._peak_of(step, *tensors(batch))
                self.known.peaks[key] = first, self._peak_of(step, *tensors(batch))
            first, again = self.known.peaks[key]
        self.model.zero_grad(set_to_none=True)
        return Pass(samples, num_bytes(batch), saved, loss, loss_alone, first, again, recomputed)

    def _count_saved(self, batch: Any) -> tuple[SavedTensors, int, int]:
        """Count the bytes that autograd saves in each part of the model, and in the loss."""
        saved = SavedTensors(self.model)
        starts = [part.start for part in self.plan.stage_parts[1:]]
        with ExitStack() as around:
            for hook in at_starts(self.model, starts, saved.begin_part):
                around.callback(hook.remove)
            around.enter_context(patched(self, watch=saved.watch))
            with saved.counting(), self._autocast():
                output, loss = self._forward(batch, before_loss=saved.begin_part)
            *model, own = saved.parts
            if len(model) != max(1, len(self.plan.stage_parts)):
                raise ValueError("the model does not call the start of each stage exactly once")
            new = sum(size for key, (size, _) in own.items() if key not in model[-1])
            alone = sum(size for size, _ in own.values())
            if self.plan.recomputed:
                loss.backward()
                self.model.zero_grad(set_to_none=True)
            del output  # a rank also keeps the output until here
        return saved, new, alone

    def _peak_of(self, run: Callable[[], Any], *existing: Any) -> int:
        """Return the peak bytes during `run`, in addition to the parameters, buffers, gradients,
        and `existing` tensors or optimizers."""
        tracker = _make_tracker()
        tracker.track_external(self.model, *existing)

        def total(kind: str) -> int:
            snapshots = tracker.get_tracker_snapshot(kind).items()
            return sum(each["Total"] for at, each in snapshots if at.type == self.device.type)

        before = total("current")
        with tracker:
            run()
        return max(0, total("peak") - before)


class _KnownSizes(TorchDispatchMode):
    """Reject operators whose fake results are too small. A recurrent layer also saves a workspace,
    whose size only the library that runs it (oneDNN, cuDNN) knows."""

    UNKNOWN = ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn")

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator.name() in self.UNKNOWN:
            raise ValueError(f"fake tensors do not show the workspace of {operator.name()}")
        return operator(*args, **kwargs or {})


def _to_fp32(tree: Any) -> Any:
    return map_tensors(lambda t: t.float() if t.is_floating_point() else t, tree)


def _make_tracker() -> Any:
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """MemTracker without the hooks that tell gradients from temporary tensors. These hooks fail
        on frozen parameters, and only the total matters here."""

        def _track_module_params_and_buffers(self, module: nn.Module, *_: Any, **__: Any) -> Any:
            return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    return Tracker()


def _build(workload: Workload, fake: Any, seed: int) -> tuple[nn.Module, str | None]:
    """Build the model with fake tensors. If its code needs real values, use real tensors."""
    seed_everything(seed)
    try:
        with fake:
            return workload.model().train(), None
    except Exception as error:
        reason = _explain(error)
    return workload.model().train(), reason


def _explain(error: Exception) -> str:
    """Describe the error in one line. Errors about missing values name only an operator."""
    name, operator = type(error).__name__, f"{error}".strip().splitlines()[:1]
    if name in ("DataDependentOutputException", "DynamicOutputShapeException"):
        what = "the model, the loss, or the optimizer"
        return f"{what} depends on the values of tensors ({', '.join(operator)})"
    return ": ".join([name, *operator])


def _workspace_bytes() -> int:
    """Return the bytes that CUDA's libraries allocate for matrix products and keep. Measure them,
    because they depend on the GPU, the libraries, and environment variables."""
    layer = nn.Linear(WORKSPACE_DIM, WORKSPACE_DIM, device="cuda")
    values = torch.randn(WORKSPACE_DIM, WORKSPACE_DIM, device="cuda", requires_grad=True)
    for _ in range(2):
        layer(values).sum().backward()
    torch.cuda.synchronize()
    ours = [layer.weight, layer.bias, values]
    sizes = [
        each.nbytes for each in [*ours, *(value.grad for value in ours if value.grad is not None)]
    ]
    return torch.cuda.memory_allocated() - sum(-(-size // 512) * 512 for size in sizes)


main = partial(answer, _reply)

if __name__ == "__main__":
    main()
