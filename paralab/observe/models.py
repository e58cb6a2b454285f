"""Wrapped models (DistributedDataParallel, DataParallel): how they were wrapped, each forward pass
that uses or bypasses the wrapper, and backward passes."""

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paralab.observe import sites
from paralab.observe.changes import Changes
from paralab.observe.collectives import rank_first, sequence
from paralab.observe.digests import first_tensor, of_tensors, raw_bytes, size_of
from paralab.observe.light import Light
from paralab.observe.rank import Fields, Guarded, Rank
from paralab.observe.reducer import find_stride_mismatches, note_reduction, strides_of
from paralab.observe.wrappers import argument, forget_with, is_inside, wrap

OPTIONS = (
    *("find_unused_parameters", "static_graph", "broadcast_buffers", "forward_sync_buffers"),
    "gradient_as_bucket_view",
)
MOST_IGNORED = 1000  # number of names to record
MOST_NODES = 2000  # search this many nodes of the graph for an overwritten tensor


class Models:
    """The wrapped models of this rank, in the order of wrapping, and their parameters' names."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.numbers: dict[int, int] = {}  # ids of the wrapper and the wrapped module -> number
        self.wrapped: list[tuple[weakref.ref[nn.Module], str]] = []
        # DDP's groups. In torch 2.13, a model that is the last owner of its group may hang.
        self.groups: set[Any] = set()
        self.names: dict[int, str] = {}  # id of a parameter -> its name
        # The strides of each model's parameters when DDP wrapped it.
        self.strides: dict[int, dict[str, tuple[int, ...]]] = {}
        self.changes = Changes(rank, self.numbers, self.names)
        self.optimized: Callable[[], list[torch.Tensor]] = list  # all parameters of optimizers
        fields = ("model", "training", "grad", "sync")
        self.light = Light(rank, "forward", fields, self._of_light, _before_forward, waits=False)
        self.forwards = self.backwards = 0

    def install(self) -> None:
        rank = self.rank
        for owner in (DistributedDataParallel, DataParallel):
            wrap(rank, owner, "__init__", "wrap", self._wrap, self._describe_wrap)
            before, after = self._forward, self._describe_forward
            wrap(rank, owner, "forward", "forward", before, after, light=self.light)
        wrap(rank, Join, "__enter__", "join", lambda context: {})
        light = Light(rank, "backward", (), self._is_outermost, lambda args, kwargs: sequence())
        begun, done = self._backward, self._describe_backward
        wrap(rank, torch.autograd, "backward", "backward", begun, done, light=light)

    # --- wrapping

    def _wrap(self, wrapper: nn.Module, *args: Any, **kwargs: Any) -> Fields:
        self.rank.identify()
        model = describe_model(argument(args, kwargs, 0, "module"))
        kind, seq = _kind(wrapper), collective_span(sequence())
        return {"kind": kind, "seq": seq, **model, "options": _options(kwargs)}

    def _describe_wrap(self, result: Any, wrapper: nn.Module, *args: Any, **kwargs: Any) -> Fields:
        module: nn.Module = wrapper.module  # type: ignore[assignment]
        number, kind = len(self.wrapped), _kind(wrapper)
        self.wrapped.append((weakref.ref(wrapper), kind))
        for known in (wrapper, module):
            self.numbers[id(known)] = number
            forget_with(known, self.numbers, id(known))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.names.update(names)
        forget_with(module, self.names, *names)
        ranks: list[int] = []
        if kind == "ddp":
            group: Any = wrapper.process_group
            self.groups.add(group)
            self.strides[number] = strides_of(module)
            ranks = dist.get_process_group_ranks(group)
        self.changes.watch()
        hook = Guarded(self.rank, self._record_bypass, in_light_steps=False)
        module.register_forward_pre_hook(hook)
        options = {name: getattr(wrapper, name) for name in OPTIONS if hasattr(wrapper, name)}
        options["device_ids"] = list(map(str, getattr(wrapper, "device_ids", None) or []))
        return {
            "ranks": ranks,
            "ignored": sorted(getattr(wrapper, "parameters_to_ignore", ()))[:MOST_IGNORED],
            "model": number,
            "seq": collective_span(rank_first(self.rank), sequence(), begun=True),
            "options": options,
        }

    def _living(self) -> list[tuple[int, nn.Module, str]]:
        pairs = enumerate(self.wrapped)
        return [(n, model, kind) for n, (known, kind) in pairs if (model := known()) is not None]

    def _record_bypass(self, module: nn.Module, inputs: Any) -> None:
        """Record a call to the wrapped module outside a wrapper's forward. The site is where the
        user called it, not one of its own methods."""
        if not is_inside(self.rank, "forward", "wrap", "pipeline"):
            fields = self._of_forward(module, inputs, {})
            site = self.rank.site(sites.where(outside=module))
            self.rank.emit("forward", **fields, through="module", seq=None, site=site)

    # --- passes

    def _of_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Fields:
        return {
            "model": self.numbers.get(id(module)),
            "training": module.training,
            "grad": torch.is_grad_enabled(),
            "sync": getattr(module, "require_backward_grad_sync", None),
            "size": size_of([args, kwargs]),
            "autocast": autocast_now(),
        }

    def _of_light(self, args: tuple[Any, ...], kwargs: Fields) -> tuple[Any, ...] | None:
        module = args[0]
        number = self.numbers.get(id(module))
        if number is None:
            return None
        sync = getattr(module, "require_backward_grad_sync", None)
        return number, module.training, torch.is_grad_enabled(), sync

    def _forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Fields | None:
        if id(module) not in self.numbers:
            return None
        self.forwards += 1
        self.rank.overwritten = None
        fields = self._of_forward(module, args, kwargs)
        if self.rank.samples(self.forwards):
            fields["random"] = random_state()
        return {**fields, "through": "wrapper", "seq": collective_span(sequence())}

    def _describe_forward(self, result: Any, *args: Any, **kwargs: Any) -> Fields:
        note_reduction(self.rank, args[0], self.numbers.get(id(args[0])), self.forwards)
        return {"seq": collective_span(rank_first(self.rank), sequence(), begun=True)}

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Fields | None:
        if is_inside(self.rank, "backward", "pipeline"):
            return None
        self.rank.identify()
        self.backwards += 1
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        fields: Fields = {
            "seq": collective_span(sequence()),
            "autocast": autocast_now(),
            "reduced": self._is_reduced(first),
        }
        fields["unsynced"] = [
            number
            for number, wrapper, _ in self._living()
            if not getattr(wrapper, "require_backward_grad_sync", True)
        ]
        if first is not None and first.numel() == 1 and self._reads_loss(first):
            value = float(first.detach())
            fields["loss"] = value if value == value and abs(value) != float("inf") else str(value)
            given = first_tensor(argument(args, kwargs, 0, "grad_tensors"))
            if given is not None and given.numel() == 1:
                fields["weight"] = float(given.detach())
        return fields

    def _is_outermost(self, args: Any, kwargs: Any) -> tuple[()] | None:
        if is_inside(self.rank, "backward", "pipeline"):
            return None
        self.rank.pass_is_made()
        return ()

    def _reads_loss(self, loss: torch.Tensor) -> bool:
        return self.rank.watched if loss.device.type == "cpu" else self.rank.samples(self.backwards)

    def _describe_backward(self, result: Any, *args: Any, **kwargs: Any) -> Fields:
        fields: Fields = {"seq": collective_span(rank_first(self.rank), sequence(), begun=True)}
        if not self.rank.samples(self.backwards):
            return fields
        living = self._living()
        ddp: list[tuple[int, Any]] = [(number, w) for number, w, kind in living if kind == "ddp"]
        gradients = [each.grad for each in self.optimized() if each.grad is not None]
        norms = [norm for norm, _ in of_tensors(gradients) if norm >= 0]  # type: ignore[misc]
        is_finite = len(norms) == len(gradients)
        laid = {str(n): find_stride_mismatches(w.module, self.strides[n]) for n, w in ddp}
        return {
            **fields,
            "lacking": {str(number): _without_grad(wrapper) for number, wrapper, _ in living},
            "grad_norm": sum(norm * norm for norm in norms) ** 0.5 if is_finite else None,
            "laid": {number: rows for number, rows in laid.items() if rows} or None,
            "unused_bytes": {
                str(number): int(w._get_ddp_logging_data().get("unused_parameter_size", 0))
                for number, w in ddp
                if w.find_unused_parameters
            },
        }

    def _is_reduced(self, loss: Any) -> bool:
        target, self.rank.overwritten = self.rank.overwritten, None
        if target is None or loss is None or loss.grad_fn is None:
            return False
        seen, waiting = {loss.grad_fn}, [loss.grad_fn]
        for node in waiting:
            if node is target:
                return True
            new = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= new
            if len(seen) < MOST_NODES:
                waiting += new
        return False


def _kind(wrapper: nn.Module) -> str:
    return "ddp" if isinstance(wrapper, DistributedDataParallel) else "data_parallel"


def _before_forward(args: Any, kwargs: Any) -> int | None:
    """Return None for a forward without collectives: no buffers and no `with model.join()`."""
    wrapper = args[0]
    join = getattr(wrapper, "_join_config", None)
    is_joined = join is not None and join.enable
    return sequence() if getattr(wrapper, "modules_buffers", True) or is_joined else None


def _without_grad(wrapper: nn.Module) -> list[str]:
    named = wrapper.module.named_parameters()  # type: ignore[union-attr]
    return [name for name, p in named if p.requires_grad and p.grad is None][:50]


def describe_model(module: nn.Module) -> Fields:
    """Describe the model that this rank has built."""
    named = list(module.named_parameters())
    parts = list(module.modules())
    kinds = [type(part).__name__ for part in parts]
    return {
        "model_class": type(module).__name__,
        "names": [name for name, _ in named],
        "shapes": [list(parameter.shape) for _, parameter in named],
        "trainable": [parameter.requires_grad for _, parameter in named],
        "buffers": [name for name, _ in module.named_buffers()],
        "batch_norms": sum(kind.startswith("BatchNorm") for kind in kinds),
        "sync_batch_norms": kinds.count("SyncBatchNorm"),
        "dropouts": sum(
            "Dropout" in type(part).__name__ and bool(getattr(part, "p", 0.0)) for part in parts
        ),
    }


def collective_span(
    last: int | None, end: int | None = None, begun: bool = False
) -> list[int] | None:
    """Return the [first, last] number of an operation's collectives. When the operation begins,
    `last` is the number of the collective before it, and the span is empty."""
    if last is None:
        return None
    if not begun:
        return [last + 1, last]
    return [last, end] if end is not None else None


def autocast_now() -> str | None:
    """Return "cpu bfloat16", or None outside autocast."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
    return None


def random_state() -> int:
    """Return a checksum of this rank's random state, which determines dropout masks and noise."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return zlib.crc32(raw_bytes((torch.cuda if on_gpu else torch).get_rng_state()))


def _options(kwargs: Fields) -> Fields:
    """Return the options that were passed, and torch's debug level (OFF, INFO, DETAIL)."""
    level = getattr(dist, "get_debug_level", None)
    debug = {"debug": level().name} if level is not None else {}
    return {**{name: kwargs[name] for name in OPTIONS if name in kwargs}, **debug}
