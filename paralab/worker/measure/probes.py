"""Measure a rank during training. A probe collects time spans and numbers for each step, and writes
them once the device has finished the step.

Each step writes a `step` event. The first `DETAILED_STEPS` steps also write details: forward,
backward, each all-reduce, and so on. After that, only every `DETAIL_EVERY`-th step writes details,
to keep the run folder small. If details would cost more than 1% of a step because of many marks on
a GPU, only some of the first steps write details (see `detail_interval`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paralab.errors import ParalabError
from paralab.record.writer import EventWriter
from paralab.worker.measure.clock import Clock, Mark
from paralab.worker.measure.memory import stored_bytes
from paralab.workload.batch import tensors

DETAILED_STEPS = 200
DETAIL_EVERY = 10
FEWEST_DETAILED = 5  # steps with details in a short run

Note = tuple[str, Mark, Mark, dict[str, Any]]


class Arriving(NamedTuple):
    """A number that is being copied from a device. The copy is complete once the device passes
    the mark."""

    number: torch.Tensor
    mark: Mark


def detail_interval(steps: int) -> int:
    """Return n such that every n-th step writes details.

    20 steps → every 4th (5 steps), 50 steps or more → every 10th
    """
    return max(1, min(DETAIL_EVERY, steps // FEWEST_DETAILED))


class Probe:
    """Collects one rank's notes. Multiple threads may add notes, because list.append is atomic."""

    def __init__(self, clock: Clock, writer: EventWriter, detail_every: int = 1) -> None:
        self.detail_every = detail_every  # applies to the first DETAILED_STEPS steps
        self.clock = clock
        self.writer = writer
        self.step = -1
        self.collectives: Counter[str] = Counter()  # collectives in this step, by kind
        self.bytes = 0
        self.only_finite = False  # whether to raise if a loss is not finite
        self._notes: list[Note] = []
        self._pending: deque[tuple[int, list[Note]]] = deque()

    @property
    def detailed(self) -> bool:
        return self.step % (self.detail_every if self.step < DETAILED_STEPS else DETAIL_EVERY) == 0

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event with the current time."""
        self.writer.write([{"event": event, "time": _round(self.clock.now()), **fields}])

    def note(self, event: str, start: Mark, end: Mark, **fields: Any) -> None:
        """Add an event to this step. Do not wait for numbers that are still on a device."""
        fields = {name: self._to_host(value) for name, value in fields.items()}
        self._notes.append((event, start, end, fields))

    @contextmanager
    def span(self, event: str, device: str | None = None, **fields: Any) -> Iterator[None]:
        if not self.detailed:
            yield
            return
        start = self.clock.mark(device)
        yield
        where = {"device": device} if device else {}
        self.note(event, start, self.clock.mark(device), **where, **fields)

    def begin_collective(
        self, kind: str, tensor: torch.Tensor, group: dist.ProcessGroup, **fields: Any
    ) -> Callable[[], None]:
        """Count a collective that begins now. Return a function to call when it ends."""
        on_stream = runs_on_stream(tensor, group)
        device = str(tensor.device) if tensor.is_cuda else None
        size = stored_bytes(tensor)
        self.collectives[kind] += 1
        self.bytes += size
        start = self.clock.mark(device)

        def note() -> None:
            if self.detailed:
                end = self.clock.mark(device) if on_stream else self.clock.now()
                self.note(kind, start, end, bytes=size, **fields)

        return note

    def begin_inside(
        self, kind: str, tensor: torch.Tensor, group: dist.ProcessGroup, unit: str, **where: Any
    ) -> Callable[[], None]:
        """Count a collective inside a forward or backward pass, which uses the result immediately.
        `unit` is what the ranks send: activations or gradients."""
        where |= {
            "bucket": self.collectives[kind],
            "unit": unit,
        }  # `bucket` is its number in this step
        blocking = not runs_on_stream(tensor, group)
        return self.begin_collective(kind, tensor, group, blocking=blocking, **where)

    def begin_step(self, step: int) -> None:
        self.step, self.bytes = step, 0
        self.collectives.clear()
        self._start = self.clock.mark()

    def end_step(self, loss: torch.Tensor, **fields: Any) -> None:
        """End the step, and write all steps that the device has finished."""
        fields |= {"all_reduces": 0} | {f"{kind}s": n for kind, n in self.collectives.items()}
        fields |= {"bytes": self.bytes, "loss": loss}
        self.note("step", self._start, self.clock.mark(), **fields)
        self._pending.append((self.step, self._notes))
        self._notes = []
        while self._pending and self.clock.is_past(self._pending[0][1][-1][2]):
            self._write_oldest()

    def discard(self) -> None:
        """Discard notes that do not belong to a step."""
        self._notes = []

    def finish(self) -> None:
        """Wait for the device and write all pending steps."""
        while self._pending:
            self._write_oldest()

    def _write_oldest(self) -> None:
        step, notes = self._pending.popleft()
        events = []
        marks: list[Mark] = []
        for event, start, end, fields in notes:
            for name, value in fields.items():
                if isinstance(value, Arriving):
                    self.clock.resolve(value.mark)
                    marks.append(value.mark)
                    fields[name] = value.number.item()
                elif isinstance(value, torch.Tensor):
                    fields[name] = value.item()
            began, ended = self.clock.resolve(start), self.clock.resolve(end)
            times = {"start": _round(began), "end": _round(ended)}
            known = {name: value for name, value in fields.items() if value is not None}
            events.append({"event": event, "step": step, **times, **known})
            marks += [start, end]
        self.clock.release(marks)
        self.writer.write(events)
        loss, skipped = events[-1]["loss"], events[-1].get("skipped")  # the last note is the step
        if self.only_finite and not skipped and not math.isfinite(loss):
            fix = "a lower learning rate; older checkpoints are still usable"
            raise ParalabError(f"The loss is {loss} in step {step}.", fix=fix)

    def _to_host(self, value: Any) -> Any:
        """Start copying a number to the CPU, because `item()` would wait for all queued work."""
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        number = torch.empty((), dtype=value.dtype, pin_memory=True)
        number.copy_(value, non_blocking=True)
        return Arriving(number, self.clock.mark(str(value.device)))


def runs_on_stream(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a collective completes on the stream (NCCL, local) rather than on the host
    (gloo)."""
    backend = dist.get_backend(group)
    return tensor.is_cuda and ("nccl" in backend or "local" in backend)


class SplitNotes:
    """Records how batches are split, in the first step and whenever the shape changes."""

    def __init__(self, devices: list[str], probe: Probe) -> None:
        self.probe = probe
        self.expected = Counter(devices)  # multiple replicas on one GPU write multiple events
        self.shapes: dict[str, list[list[int]]] = {}

    def __call__(self, device: str, inputs: Any) -> None:
        x = next(tensors(inputs))
        shape, shapes = list(x.shape), self.shapes.setdefault(device, [])
        if len(shapes) < self.expected[device] or shape not in shapes:
            shapes.append(shape)
            where = {"device": device, "physical": str(x.device)}
            self.probe.emit("split", step=self.probe.step, **where, shape=shape)

    def watch(self, model: nn.Module, device: str | None = None) -> None:
        """Record the input shapes whenever the model is called."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self(device or str(next(tensors((args, kwargs))).device), (args, kwargs))

        model.register_forward_pre_hook(hook, with_kwargs=True)


def _round(seconds: float) -> float:
    """Round to microseconds. More digits are noise, and a run may write a million times."""
    return round(seconds, 6)
