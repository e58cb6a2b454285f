"""Run one pipeline stage in its own process, without changing the user's forward().

The process calls the entire model. Modules before the stage run on meta tensors, which have only
shapes (`paralab.worker.stages.stage_shapes`). At the start of the stage, the tensors that the previous
stage sent replace the meta tensors. At the start of the next stage, an exception that carries the
tensors to send ends the call.

    the model     embed ─ block 0 ─ block 1 ─ block 2 ─ head
    this stage    (shapes only ·····)│ received → real │ cut: sent to the next stage
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from paralab.errors import UsageError
from paralab.plan.plan import Stage
from paralab.plan.schedules import UNCUT
from paralab.worker.stages.sharded_stage import ShardedStage, Shell
from paralab.worker.stages.stage_shapes import ShapeCache, ShapeMode
from paralab.workload.batch import call_model, copied, map_tensors, tensors
from paralab.workload.sample_draws import samples_of
from paralab.workload.state import put_back, state_of

FIX = f"{UNCUT}: a replica's stages then share a process, and can use each other's tensors"


class _Cut(BaseException):
    """Raised where the next stage begins. Not an Exception, which user code might catch."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


def _receive(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a received tensor to the stage's device. The model may change the copy in place."""
    if not value.requires_grad:
        return value.to(device)
    received = value.to(device, copy=True)
    received.register_hook(torch.Tensor.contiguous)  # only a contiguous gradient can be sent
    return received


class _Run(ShapeMode):
    """One micro-batch passing through one stage."""

    def __init__(self, stage: StageModule, inputs: Any, received: tuple[torch.Tensor, ...]) -> None:
        super().__init__(stage.device, stage.uses_missing)
        self.stage, self.received = stage, received
        self.returning = False  # True during backward
        self.begun = stage.number == 0
        real = stage.cast(inputs)
        self.inputs = real if self.begun else map_tensors(lambda t: t.to("meta"), inputs)
        for empty, value in zip(tensors(self.inputs), tensors(real), strict=True):
            self.know(empty, value.to(stage.device))

    def begin(self, args: Any, kwargs: Any) -> Any:
        """Begin the stage by replacing the call's arguments with the received tensors."""
        stage, self.begun = self.stage, True
        empty = list(tensors((args, kwargs)))
        assert len(empty) == len(self.received), (
            f"expected {len(empty)} tensors, but received {len(self.received)}"
        )
        entered = [_receive(tensor, self.stage.device) for tensor in self.received]
        for tensor, value in zip(empty, entered, strict=True):
            self.know(tensor, value)
        if stage.leaves_mode.get(stage.shapes):
            self.leave()
        stage.on_entry(entered)
        values = iter(entered)
        return map_tensors(lambda _: next(values), (args, kwargs))

    def cut(self, args: Any, kwargs: Any) -> _Cut:
        """Collect the tensors to send where the next stage begins."""
        sent = tensors(self.real((args, kwargs)))
        return _Cut(tuple(self._sendable(tensor).to(self.stage.wire) for tensor in sent))

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor._is_view():  # torch detaches sent tensors in place
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        else:
            tensor = tensor.contiguous()
        if self.stage.splits_backward and tensor.is_floating_point() and not tensor.requires_grad:
            tensor = tensor + tensor.new_zeros((), requires_grad=True)
        return tensor


class StageModule(nn.Module):
    """Stage `number` of the model, as a module that has only the stage's own parameters.

    The call takes the previous stage's tensors and returns a tuple for the next stage. The last
    stage passes the model's output to `finish` and returns the result. Before a call, the caller
    sets `micro_number`, which selects the inputs, and `live`. A call that is not live only
    determines shapes and must not change buffers.
    """

    active: _Run | None = None  # one per process, because its stages share the model's hooks

    def __init__(
        self,
        model: nn.Module,
        number: int,
        stages: tuple[Stage, ...],
        device: torch.device,
        wire: torch.device,
        finish: Callable[[Any, int, bool], torch.Tensor],
        sharded: ShardedStage | None = None,
    ) -> None:
        super().__init__()
        self.number, self.starts = number, [stage.start for stage in stages]
        self.device, self.wire, self.finish = device, wire, finish
        # A list keeps the model from becoming a submodule, which would add all its parameters.
        self.model = [model]
        modules = dict(model.named_modules())
        own = [modules[name] for name in stages[number].modules]
        for module in own:
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.data = tensor.data.to(device)
        self.shells = nn.ModuleList(map(Shell, own))
        self.sharded: ShardedStage | None = sharded
        self.cast: Callable[[Any], Any] = lambda inputs: inputs

        self.inputs: list[Any] = []  # tensors per micro-batch
        self.runs: dict[int, _Run] = {}
        self.micro_number, self.live = 0, False
        self.trial: _Run | None = None  # torch may run the trial's backward pass at any time
        self.shapes: Any = None  # shapes of the current inputs
        self.leaves_mode: dict[Any, bool] = {}  # shapes -> whether no meta tensors are used
        self.sends: dict[Any, int] = {}  # shapes -> the number of tensors for the next stage
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.on_entry: Callable[[Any], None] = lambda inputs: None
        # Some schedules split the backward pass in two. The second half begins where gradients
        # reach the stage's inputs, so the inputs need gradients even if all earlier layers are
        # frozen.
        self.splits_backward = False
        self._add_hooks(modules, stages)
        self.cache = ShapeCache(model, self._is_before) if number else None

    def _add_hooks(self, modules: dict[str, nn.Module], stages: tuple[Stage, ...]) -> None:
        for start in (self.number, self.number + 1):
            if 0 < start < len(stages):
                modules[self.starts[start]].register_forward_pre_hook(
                    partial(self._at_start_of, start), with_kwargs=True, prepend=True
                )
        for other, stage in enumerate(stages):
            for name in stage.modules if other != self.number else ():
                if next(modules[name].parameters(recurse=False), None) is not None:
                    modules[name].register_forward_pre_hook(partial(self._refuse, name, other))

    def _is_before(self) -> bool:
        run = StageModule.active
        return run is not None and run.stage is self and not run.begun

    def _at_start_of(self, start: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin this stage if `start` is its own number. End it if `start` is the next stage's."""
        run = StageModule.active or self.trial
        if run is None or run.stage is not self:
            return None
        if run.returning:
            # Activation checkpointing calls the module again, with the original arguments.
            return run.real((args, kwargs)) if start == self.number else None
        if start == self.number and not run.begun:
            return run.begin(args, kwargs)
        if start == self.number + 1 and run.begun:
            raise run.cut(args, kwargs)
        return None

    def _refuse(self, name: str, other: int, *_: Any) -> None:
        run = StageModule.active
        if run is not None and run.stage is self and run.begun and not run.returning:
            raise UsageError(
                f"The model called {name!r} in stage {self.number}, but {name!r} belongs to stage "
                f"{other}. The trial run took a different branch.",
                fix=FIX,
            )

    def forward(self, *received: torch.Tensor) -> Any:
        inputs = self.inputs[self.micro_number]
        run = _Run(self, inputs if self.live else copied(inputs), received)
        self.trial = None
        call = partial(self._run, run)
        if self.sharded:
            call = partial(self.sharded, call)
        if self.live:
            self.runs[self.micro_number] = run
            if self.sharded:
                self.sharded.unpin()  # the trial is over
            return call()
        before = state_of(self.model[0])
        try:
            return call()
        finally:
            put_back(self.model[0], before)
            self.leaves_mode[self.shapes] = not run.replaced
            run.returning, self.trial = True, run

    def _run(self, run: _Run) -> Any:
        StageModule.active = run
        if self.cache:
            self.cache.calls.clear()
            run.__enter__()  # type: ignore[no-untyped-call]
        else:
            self.on_entry(run.inputs)
        try:
            with self.autocast(), samples_of(self.inputs[self.micro_number]):
                output = call_model(self.model[0], run.inputs)
        except _Cut as cut:
            if not run.begun:
                raise self._not_called(self.number) from None
            self._require_same_number(len(cut.values))
            return cut.values
        except Exception as error:
            if run.begun:
                raise
            raise UsageError(
                f"The computation before {self.starts[self.number]!r} depends on more than "
                f"shapes ({type(error).__name__}: {error}).",
                fix=FIX,
            ) from error
        finally:
            StageModule.active = None
            run.leave()

        if not run.begun or self.number < len(self.starts) - 1:
            raise self._not_called(self.number + run.begun)
        with self.autocast():
            return self.finish(run.real(output), self.micro_number, self.live)

    def _require_same_number(self, sent: int) -> None:
        expected = self.sends.setdefault(self.shapes, sent)
        if sent != expected:
            raise UsageError(
                f"{self.starts[self.number + 1]!r} gets {sent} tensors in one micro-batch, but "
                f"{expected} in another with the same shapes (such as a mask that only some "
                "samples need). The next stage cannot know how many to expect.",
                fix=FIX,
            )

    def _not_called(self, number: int) -> UsageError:
        return UsageError(
            f"The model did not call {self.starts[number]!r} for this micro-batch, but stage "
            f"{number} begins there.",
            fix=f"workload split_points that every forward pass calls, or {FIX}",
        )

    def uses_missing(self, shape: tuple[int, ...]) -> UsageError:
        return UsageError(
            f"The model cannot be cut into processes at {self.starts[self.number]!r}: a tensor of "
            f"shape {shape} is computed before it and used after it, but is not one of its "
            "arguments.",
            fix=FIX,
        )

    def expect(self, shapes: Any) -> None:
        """Expect inputs with these shapes from now on."""
        self.shapes = shapes
        if self.cache:
            self.cache.shapes = shapes

    def forget(self, shapes: Any) -> None:
        self.leaves_mode.pop(shapes, None)
        self.sends.pop(shapes, None)
        if self.cache:
            self.cache.outputs.pop(shapes, None)

    @contextmanager
    def returning(self, micro_number: int, last: bool) -> Iterator[None]:
        """Run a micro-batch's backward pass in this context, which allows recomputation."""
        StageModule.active = run = self.runs[micro_number]
        run.returning = True
        try:
            yield
        finally:
            StageModule.active = None
            if last:
                del self.runs[micro_number]


def free_other_stages(model: nn.Module, stages: tuple[Stage, ...], owned: set[int]) -> None:
    """Turn other stages' parameters and buffers into meta tensors, which use no memory."""
    modules = dict(model.named_modules())
    emptied: dict[int, Any] = {}  # id -> meta tensor, so tied parameters stay tied
    for number, stage in enumerate(stages):
        for name in stage.modules if number not in owned else ():
            module = modules[name]
            for kind in (module._parameters, module._buffers):
                for key, tensor in kind.items():
                    if tensor is not None:
                        kind[key] = emptied.setdefault(id(tensor), _empty(tensor))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta
