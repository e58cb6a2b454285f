"""Find why the ranks' gradients differ before a step: the forward bypassed DDP or was inside
no_sync(), or parameters were unfrozen or moved."""

import math
from dataclasses import dataclass, replace

from paralab.doctor.events import Backward, Collective, Forward, Moved, Step, Trainable
from paralab.doctor.failures.semantics.s01_unused_parameters import find_unused
from paralab.doctor.failures.semantics.s03_static_graph_changes import find_changed_graph
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import ddp_wraps, listed, make_finding
from paralab.doctor.registry import Finding
from paralab.doctor.windows import Window, windows


@dataclass(frozen=True)
class Drift:
    """The first step in which ranks disagree. `names` are the parameters that differ."""

    seen: Observation
    ranks: list[WatchedRank]
    steps: list[Step]  # one per rank
    names: list[str]

    @property
    def number(self) -> int:
        return self.steps[0].number

    def window(self, rank: WatchedRank) -> Window | None:
        step = self.steps[self.ranks.index(rank)]
        return next((window for window in windows(rank) if window.step is step), None)

    def norms(self, of: str) -> tuple[str, ...]:
        place = self.steps[0].names.index(self.names[0])
        values = [(getattr(step, of) or [])[place] for step in self.steps]
        shown = [
            f"rank {rank.rank}: {f'norm {value[0]:.6g}' if value else 'none'}"
            for rank, value in zip(self.ranks, values, strict=True)
        ]
        return (f"{of} of {self.names[0]} at step {self.number}: {'; '.join(shown)}",)


def explain_gradients(drift: Drift) -> Finding | None:
    wrapped = {name for rank in drift.ranks for wrap in ddp_wraps(rank) for name in wrap.names}
    inside = [name for name in drift.names if name in wrapped]
    if not inside:
        return _outside(drift)
    if find_unused(drift.seen) or find_changed_graph(drift.seen):
        return None  # DDP did not finish averaging and raises in the next forward
    synced = any(e.seq and e.seq[1] >= e.seq[0] for e in drift.ranks[0].of(Backward))
    if _averages_by_hand(drift.ranks[0]) or not (drift.seen.over or synced):
        return None  # with local SGD, the ranks average parameters at intervals, or may do so later
    drift = replace(drift, names=inside)
    for cause in (_past_the_wrapper, _too_early, _not_synced, _unfrozen, _moved, _also_past):
        if finding := cause(drift):
            return finding
    why = (
        f"Before step {drift.number}, the gradients of {listed(inside)} differ between ranks, although "
        "the model went through DDP. Nothing we observed explains this."
    )
    fix = "Look for code that changes gradients on one rank between backward and this step: hooks, clipping by a local norm, noise."
    return make_finding("S08", "error", why, drift.steps[0], drift.norms("gradients"), fix=fix)


def _averages_by_hand(rank: WatchedRank) -> bool:
    """Return whether the user's all_reduce calls match all parameter shapes or their total size."""
    calls = [event.shape for event in rank.of(Collective) if event.op == "all_reduce"]
    reduced = [shape for shape in calls if shape]
    for wrap in ddp_wraps(rank):
        total = sum(math.prod(shape) for shape in wrap.shapes)
        if all(shape in reduced for shape in wrap.shapes) or total in map(math.prod, reduced):
            return True
    return False


def _outside(drift: Drift) -> Finding:
    why = (
        f"The optimizer also updates {listed(drift.names)}, which do not belong to a DDP model. "
        "Their gradients differ between ranks, so each rank trains its own copy."
    )
    fix = "Put them in the module that DDP wraps, or all-reduce their gradients before the step."
    evidence, doubt = drift.norms("gradients"), "if they should be equal"
    return make_finding("S08", "error", why, drift.steps[0], evidence, fix=fix, doubt=doubt)


def _forwards(window: Window | None) -> list[Forward]:
    passes = window.micro_steps if window else []
    return [forward for one in passes for forward in one.forwards if forward.grad]


def culprit(drift: Drift, guilty: list[WatchedRank]) -> int | None:
    return guilty[0].rank if len(guilty) == 1 < len(drift.ranks) else None


def _past_the_wrapper(drift: Drift) -> Finding | None:
    guilty = [
        (rank, window)
        for rank in drift.ranks
        if (window := drift.window(rank))
        and window.micro_steps
        and not any(forward.through == "wrapper" for forward in _forwards(window))
    ]
    if not guilty:
        return None
    window = guilty[0][1]
    past = [forward for forward in _forwards(window) if forward.through == "module"]
    part = "the module" if past else "a part or a method of the module"
    why = (
        f"The forward pass of step {drift.number} calls {part} inside DDP. DDP.forward does not run, so "
        f"nothing averages the gradients of {listed(drift.names)}."
    )
    at = past[0] if past else window.micro_steps[-1].backward
    rank = culprit(drift, [rank for rank, _ in guilty])
    return make_finding("S06", "error", why, at, drift.norms("gradients"), rank)


def _not_synced(drift: Drift) -> Finding | None:
    """Report a step whose last pass was inside no_sync()."""
    guilty = []
    for rank in drift.ranks:
        window = drift.window(rank)
        forwards = [forward for forward in _forwards(window) if forward.through == "wrapper"]
        if window and forwards and forwards[-1].sync is False:
            guilty.append((rank, window, forwards[-1]))
    if not guilty:
        return None
    rank, window, forward = guilty[0]
    own = [e for e in rank.of(Collective) if e.op == "all_reduce" and e.shape not in ([], [1])]
    doubt = "unless your own all_reduce calls average the parameters later" if own else ""
    backward, names = window.micro_steps[-1].backward, listed(drift.names)
    evidence = drift.norms("gradients")
    blamed = culprit(drift, [rank for rank, _, _ in guilty])
    if forward.model not in backward.unsynced:
        why = (
            f"The forward at {forward.site} is inside no_sync(), and this backward is outside. DDP decides "
            f"in forward, so step {drift.number} uses gradients of {names} that are not averaged."
        )
        return make_finding("G05", "error", why, backward, evidence, blamed, doubt=doubt)
    why = (
        f"The last of the {len(window.micro_steps)} passes of step {drift.number} (forward at "
        f"{forward.site}) was inside no_sync(), so the gradients of {names} were not averaged."
    )
    return make_finding("G04", "error", why, drift.steps[0], evidence, blamed, doubt=doubt)


def _too_early(drift: Drift) -> Finding | None:
    """Report forwards that all ran before the first backward. DDP then sends only once."""
    for rank in drift.ranks:
        window = drift.window(rank)
        passes = window.micro_steps if window else []
        forwards = passes[0].forwards if passes else []
        first = [f for f in forwards if f.grad and f.through == "wrapper"]
        quiet = any(f.sync is False for f in first) or any(p.backward.unsynced for p in passes)
        sent = [bool(seq and seq[1] >= seq[0]) for seq in (one.backward.seq for one in passes)]
        synced = any(forward.sync for forward in first)
        if len(first) < 2 or not quiet or not synced or not any(sent) or all(sent):
            continue
        early = sent.index(True)
        why = (
            f"{len(first)} forwards run before the first backward. Backward {early + 1} of "
            f"{len(passes)} sent its gradients; the gradients of the {len(passes) - 1 - early} "
            f"after it stay on their rank, so {listed(drift.names)} differ at step {drift.number}."
        )
        return make_finding("P06", "error", why, passes[early].backward, drift.norms("gradients"))
    return None


def _unfrozen(drift: Drift) -> Finding | None:
    rank = drift.ranks[0]
    frozen = {
        name
        for wrap in ddp_wraps(rank)
        for name, is_on in zip(wrap.names, wrap.trainable, strict=True)
        if not is_on
    }
    if not frozen.issuperset(drift.names):
        return None
    changes = [e for e in rank.of(Trainable) if e.trainable and e.name in drift.names]
    why = (
        f"{listed(drift.names)} were frozen when DDP was created and are unfrozen here. DDP does not "
        f"average their gradients, so from step {drift.number} on, every rank trains its own copy."
    )
    at = changes[0] if changes else drift.steps[0]
    return make_finding("S07", "error", why, at, drift.norms("gradients"))


def _moved(drift: Drift) -> Finding | None:
    moves = [event for event in drift.ranks[0].of(Moved) if event.t < drift.steps[0].t]
    if not moves:
        return None
    why = (
        f"The wrapped model moves here from {moves[0].before} to {moves[0].after}, which replaces the "
        f"tensors that DDP has hooks on. Nothing averages the gradients of {listed(drift.names)} at step "
        f"{drift.number}."
    )
    return make_finding("S12", "error", why, moves[0], drift.norms("gradients"))


def _also_past(drift: Drift) -> Finding | None:
    """Report a step in which only some forwards bypass the wrapper."""
    past = [f for f in _forwards(drift.window(drift.ranks[0])) if f.through == "module"]
    if not past:
        return None
    why = (
        "This forward calls the module inside DDP, while others call the wrapper. Nothing averages its "
        f"part of the gradients of {listed(drift.names)} at step {drift.number}."
    )
    return make_finding("S06", "error", why, past[0], drift.norms("gradients"))
