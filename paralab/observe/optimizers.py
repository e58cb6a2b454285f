"""Optimizer steps (gradients before, parameters after), zero_grad, schedulers, clipping, and mixed
precision."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.amp.autocast_mode import autocast
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paralab.observe.digests import first_tensor, is_sampled, of_tensors
from paralab.observe.models import Models
from paralab.observe.rank import Fields, Guarded, Rank
from paralab.observe.trial import hold
from paralab.observe.wrappers import argument, is_inside, wrap


class Optimizers:
    def __init__(self, rank: Rank, models: Models) -> None:
        self.rank, self.models = rank, models
        self.numbers: dict[int, int] = {}
        self.made: dict[int, int] = {}  # steps of each optimizer that still exists
        self.count = 0  # number of optimizers
        self.before = 0  # steps of deleted optimizers; a script may train multiple models in turn
        self.living: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.open: dict[int, Fields] = {}

    def install(self) -> None:
        wrap(self.rank, Optimizer, "__init__", "made", self._making)
        self.models.optimized = self._parameters
        is_trial = self.rank.trial_steps is not None  # in a trial, a step may have to wait
        register_optimizer_step_pre_hook(Guarded(self.rank, self._before, in_light_steps=is_trial))
        register_optimizer_step_post_hook(Guarded(self.rank, self._after, in_light_steps=True))
        number = lambda optimizer, *a, **k: {"optimizer": self.number(optimizer)}  # noqa: E731
        wrap(self.rank, Optimizer, "zero_grad", "zero_grad", number)
        wrap(self.rank, nn.Module, "zero_grad", "zero_grad", lambda *a, **k: {"optimizer": None})
        self._install_schedulers()
        for op in ("scale", "unscale_", "step", "update"):
            describe, conclude = partial(self._scaler, op), partial(self._describe_scaler_call, op)
            wrap(self.rank, GradScaler, op, "amp", describe, conclude)
        wrap(self.rank, autocast, "__enter__", "autocast", self._autocast)
        clip = nn.utils.clip_grad
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(self.rank, clip, name, "clip", self._clip, self._describe_clipping, nn.utils)

    def _making(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Register the optimizer, without an event."""
        self.living.add(optimizer)

    def _parameters(self) -> list[torch.Tensor]:
        groups = [g for optimizer in self.living for g in getattr(optimizer, "param_groups", [])]
        return list({id(p): p for group in groups for p in group["params"]}.values())

    def number(self, optimizer: Optimizer) -> int:
        number = self.numbers.get(id(optimizer))
        if number is None:
            number = self.numbers[id(optimizer)] = self.count
            self.count += 1
            self.made[number] = 0
            weakref.finalize(optimizer, self._forget, id(optimizer), number).atexit = False
        return number

    def _steps(self) -> int:
        return self.before + max(self.made.values(), default=0)

    def _forget(self, key: int, number: int) -> None:
        steps = self._steps()
        del self.numbers[key], self.made[number]
        self.before += steps - self._steps()

    # --- steps

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.rank.identify()
        number = self.number(optimizer)
        hold(self.rank, self.made[number])
        if not self.rank.watched:
            return
        made = self.made[number] + 1
        fields: Fields = {
            "optimizer": number,
            "number": made,
            "lr": [_number(group.get("lr")) for group in optimizer.param_groups],
        }
        if self.rank.samples(made):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            names = self.models.names
            fields["names"] = [names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
            fields["gradients"] = of_tensors([parameter.grad for parameter in parameters])
        self.open[number] = self.rank.open("step", fields)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self.number(optimizer)
        operation = self.open.pop(number, None)
        self.made[number] += 1
        self.rank.step_is_over(self._steps())
        if operation is None:
            return  # this was a light step
        more: Fields = {}
        if "gradients" in operation:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            more["parameters"] = of_tensors(parameters)
        self.rank.close(operation, **more, step=self.rank.steps)

    # --- learning rate

    def _install_schedulers(self) -> None:
        kinds = [lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau]
        kinds += [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]
        for kind in dict.fromkeys(kinds):
            if "step" in vars(kind):
                wrap(self.rank, kind, "step", "scheduler", self._schedule, self._describe_schedule)

    def _schedule(self, scheduler: Any, *args: Any, **kwargs: Any) -> Fields | None:
        if getattr(scheduler, "_step_count", 1) == 0 or is_inside(self.rank, "scheduler"):
            return None  # the constructor's own call
        return {"optimizer": self.numbers.get(id(getattr(scheduler, "optimizer", None)))}

    def _describe_schedule(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Fields:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return {}
        return {"lr": [_number(group.get("lr")) for group in optimizer.param_groups]}

    # --- mixed precision

    def _scaler(self, op: str, scaler: GradScaler, /, *args: Any, **kwargs: Any) -> Fields | None:
        if is_inside(self.rank, "amp"):
            return None
        optimizer = args[0] if args and isinstance(args[0], Optimizer) else None
        self._made_before = dict(self.made)
        enabled = scaler.is_enabled()
        number = self.number(optimizer) if optimizer is not None else None
        fields = {"op": op, "enabled": enabled, "optimizer": number}
        if op == "scale" and enabled and on_host(args):
            fields["scale"] = scaler.get_scale()
        return fields

    def _describe_scaler_call(
        self, op: str, result: Any, scaler: GradScaler, /, *args: Any, **kwargs: Any
    ) -> Fields:
        if op == "step":
            return {"skipped": scaler.is_enabled() and self.made == self._made_before}
        return {"scale": scaler.get_scale()} if op == "update" else {}

    def _autocast(self, context: autocast) -> Fields:
        dtype = str(context.fast_dtype).removeprefix("torch.")
        return {"dtype": dtype, "enabled": bool(context._enabled)}

    def _clip(self, parameters: Any, *args: Any, **kwargs: Any) -> Fields:
        return {"most": _number(argument(args, kwargs, 0, "max_norm", kwargs.get("clip_value")))}

    def _describe_clipping(self, result: Any, *args: Any, **kwargs: Any) -> Fields:
        if isinstance(result, torch.Tensor) and (
            result.device.type == "cpu" or is_sampled(self.rank.steps + 1)
        ):
            return {"norm": _number(result)}
        return {}


def on_host(args: Any) -> bool:
    tensor = first_tensor(args)
    return tensor is None or tensor.device.type == "cpu"


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number and abs(number) != float("inf") else None
