"""What a rank notes while it trains: spans of time and their numbers, gathered per step and written
when the device is done.

Every step leaves a `step` event. The details (forward, backward, every all-reduce, …) are kept for
the first `DETAILED_STEPS` steps and then for one step in `DETAIL_EVERY`, so that a long run's
folder stays small. Where details cost more than 1 % of a step (many marks on a GPU, see `sampled`),
they are kept for a sample of steps from the start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from paralab.errors import ParalabError
from paralab.record.writer import EventWriter
from paralab.worker.clock import Clock, Mark

DETAILED_STEPS = 200
DETAIL_EVERY = 10

FEWEST_DETAILED = 5  # of a short run

Note = tuple[str, Mark, Mark, dict[str, Any]]


class Arriving(NamedTuple):
    """A number being copied from a device; it is there when the device has passed the mark."""

    number: torch.Tensor
    mark: Mark


def sampled(steps: int) -> int:
    """Keep the details of one step in so many.

    20 steps → one in 4 (five of them), 50 and more → one in 10
    """
    return max(1, min(DETAIL_EVERY, steps // FEWEST_DETAILED))


class Probe:
    """Collects the notes of one rank. Notes may come from several threads: list.append is
    atomic."""

    def __init__(self, clock: Clock, writer: EventWriter, detail_every: int = 1) -> None:
        self.detail_every = detail_every  # among the first DETAILED_STEPS
        self.clock = clock
        self.writer = writer
        self.step = -1
        self._no_collectives()
        self.only_finite = False  # a loss that is not finite is an error
        self._notes: list[Note] = []
        self._pending: deque[tuple[int, list[Note]]] = deque()

    @property
    def detailed(self) -> bool:
        return self.step % (self.detail_every if self.step < DETAILED_STEPS else DETAIL_EVERY) == 0

    def emit(self, event: str, **fields: Any) -> None:
        """Something that happened now, written at once."""
        self.writer.write([{"event": event, "time": _round(self.clock.now()), **fields}])

    def note(self, event: str, start: Mark, end: Mark, **fields: Any) -> None:
        """Something of this step that took from start to end. Numbers that are still on a device
        stay tensors until it is done."""
        self._notes.append(
            (event, start, end, {name: self._on_host(value) for name, value in fields.items()})
        )

    @contextmanager
    def span(self, event: str, device: str | None = None, **fields: Any) -> Iterator[None]:
        if not self.detailed:
            yield
            return
        start = self.clock.mark(device)
        yield
        where = {"device": device} if device else {}
        self.note(event, start, self.clock.mark(device), **where, **fields)

    def begin_step(self, step: int) -> None:
        self.step = step
        self._no_collectives()
        self._start = self.clock.mark()

    def end_step(self, loss: torch.Tensor, **fields: Any) -> None:
        """Close the step."""
        sharded = {
            "all_gathers": self.all_gathers or None,
            "reduce_scatters": self.reduce_scatters or None,
        }
        fields |= {"all_reduces": self.all_reduces, **sharded, "bytes": self.bytes, "loss": loss}
        self.note("step", self._start, self.clock.mark(), **fields)
        self._pending.append((self.step, self._notes))
        self._notes = []
        while self._pending and self.clock.is_past(self._pending[0][1][-1][2]):
            self._write_oldest()

    def discard(self) -> None:
        """Forget what was noted of a step that has not begun."""
        self._notes = []

    def finish(self) -> None:
        """Write every step that is still pending; waits for the device."""
        while self._pending:
            self._write_oldest()

    def _no_collectives(self) -> None:
        self.all_reduces = self.all_gathers = self.reduce_scatters = self.bytes = 0

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
            times = {
                "start": _round(self.clock.resolve(start)),
                "end": _round(self.clock.resolve(end)),
            }
            known = {name: value for name, value in fields.items() if value is not None}
            events.append({"event": event, "step": step, **times, **known})
            marks += [start, end]
        self.clock.release(marks)
        self.writer.write(events)
        loss, skipped = (
            events[-1]["loss"],
            events[-1].get("skipped"),
        )  # the step itself is its last note
        if self.only_finite and not skipped and not math.isfinite(loss):
            raise ParalabError(
                f"The loss is {loss} in step {step}.",
                fix="a lower learning rate; older checkpoints are whole",
            )

    def _on_host(self, value: Any) -> Any:
        """A device's number on its way to the host. `item()` would wait for all that is in the
        stream, also for later steps."""
        if isinstance(value, torch.Tensor) and value.is_cuda:
            number = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(
                value, non_blocking=True
            )
            return Arriving(number, self.clock.mark(str(value.device)))
        return value


def _round(seconds: float) -> float:
    """Microseconds: finer is noise, and every digit is written a million times."""
    return round(seconds, 6)
