"""One part of a model in a process of its own, the user's forward unchanged.

The process calls the whole model. What comes before its part is computed for its shapes alone (on the meta device: no memory, no
arithmetic), because Python has to walk through it; where the part begins, the tensors that the previous part sent take the place of
the empty ones; where the next part begins, the call is left by an exception that carries the tensors to send.

    the model     embed ─ block 0 ─ block 1 ─ block 2 ─ head
    this part     (shapes only ·····)│ received → real │ cut: sent to the next part
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import _device_constructors

from paralab.errors import UsageError
from paralab.plan.plan import Stage
from paralab.plan.schedules import UNCUT
from paralab.workload.batch import call_model, map_tensors, tensors

CURE = f"{UNCUT}: the stages of a replica then share a process, and tensors may go past a cut"


class _Cut(BaseException):
    """The next part begins here. Not an Exception: a user's `except Exception` must not swallow it."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class _Enter(torch.autograd.Function):
    """What was received, as the part's own tensor: a copy, which may be changed in place, on the part's device."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.came_from = value.device
        return value.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.contiguous().to(ctx.came_from), None  # what is sent must be contiguous


class _Shapes(TorchFunctionMode):
    """Before the part begins: every operator on meta tensors. In it: empty tensors are replaced by the real ones they stand for."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.run.begun:
            return func(*self.run.real(args, func), **self.run.real(kwargs, func))
        if func in _device_constructors():
            kwargs = kwargs | {"device": "meta"}
        if not any(True for _ in tensors((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = map_tensors(lambda t: t if t.is_meta else t.to("meta"), (args, kwargs))
        with torch.no_grad():
            return func(*args, **kwargs)


class _Run:
    """One micro-batch on its way through one part."""

    def __init__(self, part: Part, inputs: Any, received: tuple[torch.Tensor, ...]) -> None:
        self.part, self.received = part, received
        self.begun, self.returning = part.number == 0, False
        self.inputs = inputs if self.begun else map_tensors(lambda t: t.to("meta"), inputs)
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of an empty tensor -> (itself, the real one)
        for empty, value in zip(tensors(self.inputs), tensors(inputs), strict=True):
            self.known[id(empty)] = (empty, value)
        self.mode = None if self.begun else _Shapes(self)
        self.asked = False  # whether an empty tensor had to be replaced inside the part

    def begin(self, args: Any, kwargs: Any) -> Any:
        """The part begins: put what was received into the call."""
        part, self.begun = self.part, True
        empty = list(tensors((args, kwargs)))
        assert len(empty) == len(self.received), f"{len(empty)} tensors cross, {len(self.received)} were received"
        entered = [_Enter.apply(t, part.device) if t.requires_grad else t.to(part.device) for t in self.received]  # type: ignore[no-untyped-call]
        self.known |= {id(e): (e, value) for e, value in zip(empty, entered, strict=True)}
        if part.leaves_early and self.mode:
            _leave(self.mode)
        part.on_entry(entered[0])
        values = iter(entered)
        return map_tensors(lambda _: next(values), (args, kwargs))

    def cut(self, args: Any, kwargs: Any) -> _Cut:
        crossing = tensors(self.real((args, kwargs)))
        # Not a view: torch detaches in place what it has sent.
        own = (t.clone(memory_format=torch.contiguous_format) if t._is_view() else t.contiguous() for t in crossing)
        return _Cut(tuple(t.to(self.part.wire) for t in own))

    def real(self, tree: Any, func: Any = None) -> Any:
        """The tree with the real tensors in the place of the empty ones."""

        def replaced(value: torch.Tensor) -> torch.Tensor:
            if not value.is_meta:
                return value
            if id(value) in self.known:
                self.asked = True
                return self.known[id(value)][1]
            if getattr(func, "__name__", "") == "__get__":  # a shape, a type: known of empty tensors as well
                return value
            raise UsageError(
                f"The model cannot be cut at {self.part.starts[self.part.number]!r} into processes: a tensor of shape "
                f"{tuple(value.shape)} is computed before it and used past it, without being an argument of it.",
                cure=CURE,
            )

        return map_tensors(replaced, tree)


class Part(nn.Module):
    """Part `number` of the model, as a module whose parameters are those it owns.

    Called with the tensors of the part before, it returns a tuple for the next one; the last one returns what `finish` makes of the
    model's output. The inputs are those of micro-batch `chunk`, which the caller sets, as `live` (a trial otherwise: it only tells
    shapes, and must not change buffers).
    """

    active: _Run | None = None  # what this process runs just now: its parts share the hooks of one model

    def __init__(
        self,
        model: nn.Module,
        number: int,
        parts: tuple[Stage, ...],
        device: torch.device,
        wire: torch.device,
        finish: Callable[[Any, int, bool], torch.Tensor],
    ) -> None:
        super().__init__()
        self.number, self.starts, self.device, self.wire, self.finish = number, [part.start for part in parts], device, wire, finish
        self.model = [model]  # in a list: not a sub-module, whose parameters would count as this part's
        modules = dict(model.named_modules())
        own = [modules[name] for name in parts[number].modules]
        for module in own:
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.data = tensor.data.to(device)
        self.held = nn.ParameterList(dict.fromkeys(p for module in own for p in module.parameters(recurse=False)))
        self.own_buffers = [buffer for module in own for buffer in module.buffers(recurse=False)]
        self.inputs: list[Any] = []  # per micro-batch
        self.runs: dict[int, _Run] = {}
        self.chunk, self.live, self.leaves_early = 0, False, False
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.on_entry: Callable[[torch.Tensor], None] = lambda first: None
        self.trial: _Run | None = None  # its backward pass is run by torch, whenever it likes
        for place in (number, number + 1):
            if 0 < place < len(parts):
                modules[self.starts[place]].register_forward_pre_hook(self._at(place), with_kwargs=True, prepend=True)
        if number:
            self.memo = _Memo(model, self)

    def _at(self, place: int) -> Callable[..., Any]:
        """The hook where a part begins: this one, or the next."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            run = Part.active or self.trial
            if run is None or run.part is not self:
                return None
            if run.returning:  # activation checkpointing calls the module again on the way back, with what it was called with
                return run.real((args, kwargs)) if place == self.number else None
            if place == self.number and not run.begun:
                return run.begin(args, kwargs)
            if place == self.number + 1 and run.begun:
                raise run.cut(args, kwargs)
            return None

        return hook

    def forward(self, *received: torch.Tensor) -> Any:
        run = _Run(self, self.inputs[self.chunk], received)
        self.trial = None
        if self.live:
            self.runs[self.chunk] = run
            return self._run(run)
        kept = [buffer.clone() for buffer in self.own_buffers]
        try:
            return self._run(run)
        finally:
            for buffer, before in zip(self.own_buffers, kept, strict=True):
                buffer.data.copy_(before)  # .data: the graph of this trial must not see it as a change
            self.leaves_early, run.returning, self.trial = not run.asked, True, run

    def _run(self, run: _Run) -> Any:
        Part.active = run
        if run.mode:
            self.memo.rewind()
            run.mode.__enter__()  # type: ignore[no-untyped-call]
        else:
            self.on_entry(next(tensors(run.inputs)))
        try:
            with self.autocast():
                output = call_model(self.model[0], run.inputs)
        except _Cut as cut:
            return cut.values
        except Exception as error:
            if run.begun:
                raise
            raise UsageError(
                f"What the model computes before {self.starts[self.number]!r} cannot be told from the shapes alone "
                f"({type(error).__name__}: {error}).",
                cure=CURE,
            ) from error
        finally:
            Part.active = None
            if run.mode:
                _leave(run.mode)
        assert self.number == len(self.starts) - 1, "the next part never began"
        with self.autocast():
            return self.finish(run.real(output), self.chunk, self.live)

    def new_shapes(self) -> None:
        """The inputs will have other shapes from now on."""
        self.leaves_early = False
        if self.number:
            self.memo.forget()

    @contextmanager
    def returning(self, chunk: int, last: bool) -> Iterator[None]:
        """Around a backward pass of this micro-batch: what is computed again there is computed as before."""
        Part.active = run = self.runs[chunk]
        run.returning = True
        try:
            yield
        finally:
            Part.active = None
            if last:
                del self.runs[chunk]


class _Memo:
    """Shapes of what comes before a part do not change from call to call: a sub-module's answer is kept for the next micro-batch.

    Kept are the outputs of all sub-modules that are done before the part begins, until the inputs' shape changes (`forget`)."""

    def __init__(self, model: nn.Module, part: Part) -> None:
        self.part = part
        self.answers: dict[tuple[int, int], Any] = {}
        self.calls: dict[int, int] = {}
        for name, module in model.named_modules():
            if name:
                module.forward = self._remembering(module, module.forward)

    def _remembering(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            run = Part.active
            if run is None or run.part is not self.part or run.begun:
                return forward(*args, **kwargs)
            key = id(module), self.calls.get(id(module), 0)
            self.calls[id(module)] = key[1] + 1
            if key not in self.answers:
                answer = forward(*args, **kwargs)
                if run.begun:  # the part began inside: this is no sub-module before it
                    return answer
                self.answers[key] = answer
            return self.answers[key]

        return remembered

    def rewind(self) -> None:
        self.calls.clear()

    def forget(self) -> None:
        self.answers.clear()


def _leave(mode: TorchFunctionMode) -> None:
    """Leave the mode, if it is the innermost one (it may have been left already, when the part began)."""
    if _get_current_function_mode() is mode:
        mode.__exit__(None, None, None)


def keep_only(model: nn.Module, parts: tuple[Stage, ...], owned: set[int]) -> None:
    """Free what the other parts own: their parameters and buffers become meta tensors, which have shapes and no memory."""
    modules = dict(model.named_modules())
    emptied: dict[int, Any] = {}  # by id, so that tied parameters stay tied
    for number, part in enumerate(parts):
        for name in part.modules if number not in owned else ():
            module = modules[name]
            for kind in (module._parameters, module._buffers):
                for key, tensor in kind.items():
                    if tensor is not None:
                        kind[key] = emptied.setdefault(id(tensor), _empty(tensor))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    meta = tensor.detach().to("meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
