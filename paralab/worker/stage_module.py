"""One part of a model in a process of its own, the user's forward unchanged.

The process calls the whole model. What comes before its part is computed for its shapes alone (on
the meta device: no memory, no arithmetic), because Python has to walk through it; where the part
begins, the tensors that the previous part sent take the place of the empty ones; where the next
part begins, the call is left by an exception that carries the tensors to send.

    the model     embed ─ block 0 ─ block 1 ─ block 2 ─ head
    this part     (shapes only ·····)│ received → real │ cut: sent to the next part

What depends only on the inputs and on no parameter (a padding mask, a branch `if x.any()`) is
computed for real when its value is needed: every process has the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import _device_constructors

from paralab.errors import UsageError
from paralab.plan.plan import Stage
from paralab.plan.schedules import UNCUT
from paralab.workload.batch import call_model, map_tensors, map_tree, tensors
from paralab.workload.proof_controls import samples_of
from paralab.workload.state import put_back, state_of

CURE = f"{UNCUT}: the stages of a replica then share a process, and tensors may go past a cut"


class _Cut(BaseException):
    """The next part begins here. Not an Exception: a user's `except Exception` must not swallow
    it."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class _Enter(torch.autograd.Function):
    """What was received, as the part's own tensor: a copy, which may be changed in place, on the
    part's device."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.came_from = value.device
        return value.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.contiguous().to(ctx.came_from), None  # what is sent must be contiguous


class _Shapes(TorchFunctionMode):
    """Before the part begins: every operator on meta tensors. In it: empty tensors are replaced by
    the real ones they stand for."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.run.begun:
            return func(*self.run.real(args, func), **self.run.real(kwargs, func))
        constructs = func in _device_constructors()
        if not constructs and not any(True for _ in tensors((args, kwargs))):
            return func(*args, **kwargs)
        source = self.run.source(func, args, kwargs)
        if source and getattr(func, "__name__", "") in VALUES:
            return source.value()
        try:
            with torch.no_grad():
                args, kwargs = map_tensors(
                    lambda t: t if t.is_meta else t.to("meta"), (args, kwargs)
                )
                empty = func(*args, **(kwargs | {"device": "meta"} if constructs else kwargs))
        except (RuntimeError, NotImplementedError):
            if source is None:
                raise
            empty = map_tensors(
                lambda t: t.to("meta"), source.value()
            )  # the shape depends on the values, as that of nonzero()
        if source:
            self.run.remember(source, args, empty)
        return empty


VALUES = (
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
)  # not tensors


class _Source:
    """How to compute, for real, what an empty tensor stands for. Nothing is computed unless
    somebody asks for the value."""

    def __init__(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
        self.func, self.args, self.kwargs, self.device = func, args, kwargs, device
        self._answer: list[Any] = []

    def value(self) -> Any:
        if not self._answer:
            args, kwargs = (
                map_tree(_Source.value, tree, _is_source) for tree in (self.args, self.kwargs)
            )
            if _changes_in_place(self.func):
                args = (args[0].clone(), *args[1:])
            if self.func in _device_constructors() or "device" in kwargs:
                asked = kwargs.get(
                    "device"
                )  # the model may have asked for that of its inputs, which are empty here
                kwargs = kwargs | {
                    "device": self.device
                    if asked is None or torch.device(asked).type == "meta"
                    else asked
                }
            with torch.no_grad(), DisableTorchFunction():
                answer = self.func(*args, **kwargs)
            self._answer.append(args[0] if answer is None else answer)
        return self._answer[0]


class _Known(_Source):
    """An input, or another tensor whose value is at hand."""

    def __init__(self, value: torch.Tensor) -> None:
        self._answer = [value]


class _Item(_Source):
    """One of several answers."""

    def __init__(self, source: _Source, number: int) -> None:
        self.source, self.number = source, number

    def value(self) -> Any:
        return list(tensors(self.source.value()))[self.number]


def _is_source(item: Any) -> bool:
    return isinstance(item, _Source)


def _changes_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class _Run:
    """One micro-batch on its way through one part."""

    def __init__(self, part: Part, inputs: Any, received: tuple[torch.Tensor, ...]) -> None:
        self.part, self.received = part, received
        self.begun, self.returning = part.number == 0, False
        self.inputs = inputs if self.begun else map_tensors(lambda t: t.to("meta"), inputs)
        self.known: dict[
            int, tuple[torch.Tensor, _Source]
        ] = {}  # id of an empty tensor -> (itself, where the real one comes from)
        for empty, value in zip(tensors(self.inputs), tensors(inputs), strict=True):
            self.known[id(empty)] = (empty, _Known(value.to(part.device)))
        self.mode = None if self.begun else _Shapes(self)
        self.asked = False  # whether an empty tensor had to be replaced inside the part

    def begin(self, args: Any, kwargs: Any) -> Any:
        """The part begins: put what was received into the call."""
        part, self.begun = self.part, True
        empty = list(tensors((args, kwargs)))
        assert len(empty) == len(self.received), (
            f"{len(empty)} tensors cross, {len(self.received)} were received"
        )
        enter: Any = _Enter.apply
        entered = [
            enter(t, part.device) if t.requires_grad else t.to(part.device) for t in self.received
        ]
        self.known |= {id(e): (e, _Known(value)) for e, value in zip(empty, entered, strict=True)}
        if part.leaves_early.get(part.shapes) and self.mode:
            _leave(self.mode)
        part.on_entry(entered[0])
        values = iter(entered)
        return map_tensors(lambda _: next(values), (args, kwargs))

    def cut(self, args: Any, kwargs: Any) -> _Cut:
        crossing = tensors(self.real((args, kwargs)))
        # Not a view: torch detaches in place what it has sent.
        own = (
            t.clone(memory_format=torch.contiguous_format) if t._is_view() else t.contiguous()
            for t in crossing
        )
        if self.part.halves:
            own = (
                t
                if t.requires_grad or not t.is_floating_point()
                else t + t.new_zeros((), requires_grad=True)
                for t in own
            )
        return _Cut(tuple(t.to(self.part.wire) for t in own))

    def source(self, func: Any, args: Any, kwargs: Any) -> _Source | None:
        """How to compute this call for real; None where it needs a parameter, or what another part
        computes."""
        unknown = False

        def source_of(value: torch.Tensor) -> Any:
            nonlocal unknown
            if id(value) in self.known:
                return self.known[id(value)][1]
            unknown = unknown or value.is_meta or isinstance(value, nn.Parameter)
            return _Known(value)

        args, kwargs = map_tensors(source_of, (args, kwargs))
        return None if unknown else _Source(func, args, kwargs, self.part.device)

    def remember(self, source: _Source, args: Any, empty: Any) -> None:
        if _changes_in_place(source.func):
            empty = args[0]
        found = list(tensors(empty))
        for number, tensor in enumerate(found):
            self.known[id(tensor)] = (tensor, source if tensor is empty else _Item(source, number))

    def real(self, tree: Any, func: Any = None) -> Any:
        """The tree with the real tensors in the place of the empty ones."""

        def replaced(value: torch.Tensor) -> torch.Tensor:
            if not value.is_meta:
                return value
            if id(value) in self.known:
                self.asked = True
                real: torch.Tensor = self.known[id(value)][1].value()
                return real
            if (
                getattr(func, "__name__", "") == "__get__"
            ):  # a shape, a type: known of empty tensors as well
                return value
            raise UsageError(
                f"The model cannot be cut at {self.part.starts[self.part.number]!r} into processes: a tensor of shape "
                f"{tuple(value.shape)} is computed before it and used past it, without being an argument of it.",
                fix=CURE,
            )

        return map_tensors(replaced, tree)


class Part(nn.Module):
    """Part `number` of the model, as a module whose parameters are those it owns.

    Called with the tensors of the part before, it returns a tuple for the next one; the last one
    returns what `finish` makes of the model's output. The inputs are those of micro-batch `chunk`,
    which the caller sets, as `live` (a trial otherwise: it only tells shapes, and must not change
    buffers).
    """

    active: _Run | None = (
        None  # what this process runs just now: its parts share the hooks of one model
    )

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
        self.number, self.starts, self.device, self.wire, self.finish = (
            number,
            [part.start for part in parts],
            device,
            wire,
            finish,
        )
        self.model = [
            model
        ]  # in a list: not a sub-module, whose parameters would count as this part's
        modules = dict(model.named_modules())
        own = [modules[name] for name in parts[number].modules]
        for module in own:
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.data = tensor.data.to(device)
        self.held = nn.ParameterList(
            dict.fromkeys(p for module in own for p in module.parameters(recurse=False))
        )
        self.inputs: list[Any] = []  # per micro-batch
        self.runs: dict[int, _Run] = {}
        self.chunk, self.live = 0, False
        self.leaves_early: dict[
            Any, bool
        ] = {}  # by shapes: nothing empty had to be replaced inside the part
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        # The backward pass comes in two halves, of which the second begins where gradients reach
        # the part's inputs: they must, also where everything before the part is frozen.
        self.halves = False
        self.shapes: Any = None  # which of several shapes the inputs have now
        self.on_entry: Callable[[torch.Tensor], None] = lambda first: None
        self.trial: _Run | None = None  # its backward pass is run by torch, whenever it likes
        for place in (number, number + 1):
            if 0 < place < len(parts):
                modules[self.starts[place]].register_forward_pre_hook(
                    self._at(place), with_kwargs=True, prepend=True
                )
        if number:
            self.memo = _Memo(model, self)
        for other, part in enumerate(parts):
            for name in part.modules if other != number else ():
                if any(True for _ in modules[name].parameters(recurse=False)):
                    modules[name].register_forward_pre_hook(self._not_ours(name, other))

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

    def _not_ours(self, name: str, other: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            run = Part.active
            if run is not None and run.part is self and run.begun and not run.returning:
                raise UsageError(
                    f"The forward called {name!r} in part {self.number} of the model, but {name!r} belongs to part {other}: the "
                    "trial run took another branch.",
                    fix=CURE,
                )

        return hook

    def forward(self, *received: torch.Tensor) -> Any:
        run = _Run(self, self.inputs[self.chunk], received)
        self.trial = None
        if self.live:
            self.runs[self.chunk] = run
            return self._run(run)
        before = state_of(self.model[0])
        try:
            return self._run(run)
        finally:
            put_back(self.model[0], before)
            self.leaves_early[self.shapes], run.returning, self.trial = not run.asked, True, run

    def _run(self, run: _Run) -> Any:
        Part.active = run
        if run.mode:
            self.memo.rewind()
            run.mode.__enter__()  # type: ignore[no-untyped-call]
        else:
            self.on_entry(next(tensors(run.inputs)))
        try:
            with self.autocast(), samples_of(self.inputs[self.chunk]):
                output = call_model(self.model[0], run.inputs)
        except _Cut as cut:
            if not run.begun:
                raise self._skipped(self.number) from None
            return cut.values
        except Exception as error:
            if run.begun:
                raise
            raise UsageError(
                f"What the model computes before {self.starts[self.number]!r} cannot be told from the shapes alone "
                f"({type(error).__name__}: {error}).",
                fix=CURE,
            ) from error
        finally:
            Part.active = None
            if run.mode:
                _leave(run.mode)
        if not run.begun or self.number < len(self.starts) - 1:
            raise self._skipped(self.number + run.begun)
        with self.autocast():
            return self.finish(run.real(output), self.chunk, self.live)

    def _skipped(self, number: int) -> UsageError:
        return UsageError(
            f"The forward did not call {self.starts[number]!r} for this micro-batch, and part {number} of the model begins there.",
            fix=f"split_points of the workload that every forward calls, or {CURE}",
        )

    def expect(self, shapes: Any) -> None:
        """The inputs have these shapes from now on."""
        self.shapes = shapes
        if self.number:
            self.memo.recall(shapes)

    def forget(self, shapes: Any) -> None:
        self.leaves_early.pop(shapes, None)
        if self.number:
            self.memo.forget(shapes)

    @contextmanager
    def returning(self, chunk: int, last: bool) -> Iterator[None]:
        """Around a backward pass of this micro-batch: what is computed again there is computed as
        before."""
        Part.active = run = self.runs[chunk]
        run.returning = True
        try:
            yield
        finally:
            Part.active = None
            if last:
                del self.runs[chunk]


class _Memo:
    """Reuse the shapes of what comes before a part: they depend only on the shapes of the inputs.

    Keeps the outputs of all submodules with parameters that finish before the part begins. Every
    set of input shapes has its own answers: in a sequence of lengths A, B, A, the third batch must
    not get B's."""

    def __init__(self, model: nn.Module, part: Part) -> None:
        self.part = part
        self.answers: dict[tuple[Any, ...], Any] = {}
        self.by_shapes: dict[Any, dict[tuple[Any, ...], Any]] = {}
        self.calls: dict[int, int] = {}
        for name, module in model.named_modules():
            if name and any(
                True for _ in module.parameters()
            ):  # without parameters its answer may be an input's, for real
                module.forward = self._remembering(module, module.forward)

    def _remembering(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            run = Part.active
            if run is None or run.part is not self.part or run.begun:
                return forward(*args, **kwargs)
            number = self.calls.get(id(module), 0)
            self.calls[id(module)] = number + 1
            # The arguments, too: where the forward takes another way, the same call may be asked
            # something else.
            key = id(module), number, shapes_of((args, kwargs))
            if key not in self.answers:
                answer = forward(*args, **kwargs)
                if run.begun:  # the part began inside: this is no sub-module before it
                    return answer
                self.answers[key] = answer
            return self.answers[key]

        return remembered

    def rewind(self) -> None:
        self.calls.clear()

    def recall(self, shapes: Any) -> None:
        self.answers = self.by_shapes.setdefault(shapes, {})

    def forget(self, shapes: Any) -> None:
        self.by_shapes.pop(shapes, None)


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """What the shapes of a model's answers depend on: the shapes and types of its tensors, and the
    numbers and words among them."""
    found: list[Any] = []

    def leaf(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.append((tuple(item.shape), item.dtype))
        elif isinstance(item, int | float | bool | str | None):
            found.append(item)

    map_tree(leaf, tree, lambda item: not isinstance(item, list | tuple | Mapping))
    return tuple(found)


def _leave(mode: TorchFunctionMode) -> None:
    """Leave the mode, if it is the innermost one (it may have been left already, when the part
    began)."""
    if _get_current_function_mode() is mode:
        mode.__exit__(None, None, None)


def keep_only(model: nn.Module, parts: tuple[Stage, ...], owned: set[int]) -> None:
    """Free what the other parts own: their parameters and buffers become meta tensors, which have
    shapes and no memory."""
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
    return (
        nn.Parameter(meta, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else meta
    )
