"""Group one rank's backward passes into windows: the passes whose gradients one optimizer step
applies together.

Optimizers may take turns (a GAN has two), so every step ends a window. Passes whose gradients were
cleared before the step do not belong to it. A step that the scaler skipped also ends a window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from paralab.doctor.events import Amp, Backward, Batch, Clip, Event, Forward, Loss, Step, ZeroGrad
from paralab.doctor.observation import WatchedRank


@dataclass
class MicroStep:
    """One backward pass and the events that led to it. `scale` is the GradScaler's scale, or 1
    without a scaler. `cleared` lists the optimizers that cleared gradients after the pass, with
    None for Module.zero_grad."""

    backward: Backward
    forwards: list[Forward] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    scale: float = 1.0
    cleared: list[int | None] = field(default_factory=list)

    @property
    def is_mean(self) -> bool:
        return {loss.reduction for loss in self.losses if loss.grad} == {"mean"}

    @property
    def loss_value(self) -> float | None:
        """Return the sum of the loss functions' results, or None if one of them is unknown."""
        values = [loss.value for loss in self.losses if loss.grad]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None

    @property
    def factor(self) -> float | None:
        """Return the factor that the user applied to the loss before backward, such as 1/4."""
        given, value, weight = self.backward.loss, self.loss_value, self.backward.weight
        if not isinstance(given, float | int) or not value or not self.scale:
            return None
        return given * (1.0 if weight is None else weight) / (value * self.scale)

    @property
    def size(self) -> int | None:
        sizes = [forward.size for forward in self.forwards if forward.grad]
        return sizes[-1] if sizes else None


@dataclass
class Window:
    """`step` is None if the scaler skipped it or it has not run yet."""

    micro_steps: list[MicroStep]
    events: list[Event]
    step: Step | None = None
    skipped: bool = False

    @property
    def is_accumulated(self) -> bool:
        """Return whether the passes come from one loop, not from multiple losses of one batch. In a
        loop, the same line runs repeatedly, from the same callers, or from multiple callers with
        one batch each (no_sync). Multiple lines each get their own batch from one loader."""
        sites = {one.backward.site for one in self.micro_steps}
        places = {site.place for site in sites if site is not None}
        if len(self.micro_steps) < 2 or None in sites:
            return False
        if len(places) > 1:
            loaders = {batch.loader for one in self.micro_steps for batch in one.batches}
            return len(loaders) == 1 and all(one.batches for one in self.micro_steps)
        batches = sum(len(one.batches) for one in self.micro_steps)
        return len(sites) == 1 or batches == 0 or batches >= len(self.micro_steps)

    @property
    def clips(self) -> list[Clip]:
        return [event for event in self.events if isinstance(event, Clip)]


@lru_cache(maxsize=64)  # many checks need the windows
def windows(rank: WatchedRank) -> list[Window]:
    """Return the windows in order. The last window may lack a step."""
    result: list[Window] = []
    events: list[Event] = []
    passes: list[MicroStep] = []
    unfinished = MicroStep(Backward())
    for event in rank.events:
        events.append(event)
        match event:
            case Forward():
                unfinished.forwards.append(event)
            case Loss():
                unfinished.losses.append(event)
            case Batch():
                unfinished.batches.append(event)
            case Amp(op="scale", enabled=True):
                unfinished.scale = event.scale or 0.0
            case ZeroGrad():
                for one in passes:
                    one.cleared.append(event.optimizer)
            case Backward():
                unfinished.backward = event
                passes.append(unfinished)
                unfinished = MicroStep(Backward())
            case Step() | Amp(op="step", skipped=True):
                own = {None, event.optimizer}
                kept = [one for one in passes if own.isdisjoint(one.cleared)]
                step = event if isinstance(event, Step) else None
                result.append(Window(kept, events, step, step is None))
                events, passes = [], []
    if passes:
        result.append(Window(passes, events))
    return result


def accumulated(rank: WatchedRank) -> Iterator[Window]:
    """Yield the windows that accumulate micro-batches and end in a step, even a skipped one."""
    for window in windows(rank):
        if (window.step or window.skipped) and window.is_accumulated:
            yield window


def is_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other))


def are_weighted_by(passes: list[MicroStep], counts: list[int]) -> bool:
    """Return whether the user weighted each pass by its count, or True if that is unknown."""
    pairs = zip((one.factor for one in passes), counts, strict=True)
    shares = [factor / count for factor, count in pairs if factor is not None and count]
    return len(shares) < len(passes) or all(is_close(share, shares[0]) for share in shares)
