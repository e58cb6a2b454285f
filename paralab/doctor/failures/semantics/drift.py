"""Why replicas drift apart: the first step on which ranks disagree, and its one cause.

Many mistakes end in different parameters: a step that some ranks skip, a forward past DDP, no_sync()
around the wrong passes, parameters that were unfrozen, moved, or loaded after wrapping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from paralab.doctor.agreement import (
    differing,
    found,
    is_data_parallel,
    listed,
    place_of,
    watched,
    wraps,
)
from paralab.doctor.events import (
    Amp,
    Backward,
    Collective,
    Forward,
    Join,
    LoadState,
    Moved,
    Pipeline,
    Scheduled,
    Step,
    Trainable,
)
from paralab.doctor.failures.semantics.s01_unused_parameters import find_unused
from paralab.doctor.failures.semantics.s03_static_graph_changes import find_changed_graph
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.windows import Window, windows

ALL_WATCHED = 64  # first steps, of which everything is recorded
# Collectives in which ranks receive and do not contribute.
RECEIVE = {
    "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier",
    "monitored_barrier", "send", "recv", "isend", "irecv", "send_object_list",
    "recv_object_list", "batch_isend_irecv",
}  # fmt: skip


@dataclass(frozen=True)
class Apart:
    """The first step on which ranks disagree. `names`: the parameters that differ."""

    seen: Observation
    ranks: list[RankSeen]
    steps: list[Step]  # one per rank
    names: list[str]

    @property
    def number(self) -> int:
        return self.steps[0].number

    def window(self, rank: RankSeen) -> Window | None:
        step = self.steps[self.ranks.index(rank)]
        return next((window for window in windows(rank) if window.step is step), None)

    def norms(self, of: str) -> tuple[str, ...]:
        """The evidence: the norm of the first tensor that differs, on each rank."""
        place = self.steps[0].names.index(self.names[0])
        values = [(getattr(step, of) or [])[place] for step in self.steps]
        shown = [
            f"rank {rank.rank}: {f'norm {value[0]:.6g}' if value else 'none'}"
            for rank, value in zip(self.ranks, values, strict=True)
        ]
        return (f"{of} of {self.names[0]} at step {self.number}: {'; '.join(shown)}",)


@lru_cache(maxsize=1)
def find_cause(seen: Observation) -> Finding | None:
    if len(seen.ranks) < 2 or not watched(seen):
        return None
    if any(rank.of(Pipeline) or rank.of(Join) for rank in seen.ranks):
        return None  # each rank has its own stage, or its own number of steps
    if uneven := _unequal_steps(seen):
        return uneven
    for ranks in _replicas(seen):
        common = [s for s in _common_steps(ranks) if not _is_of_another_group(ranks, s[0])]
        ignored = {name for wrap in wraps(ranks[0]) for name in wrap.ignored}
        # What follows the last step may explain it: an exception.
        for steps in common if seen.settled else common[:-1]:
            gradients = _names_that_differ(steps, "gradients", ignored)
            if gradients:
                return _explain_gradients(Apart(seen, ranks, steps, gradients))
            parameters = _names_that_differ(steps, "parameters", ignored)
            if parameters and _train_one_model(ranks[0], steps[0]):
                return _explain_parameters(Apart(seen, ranks, steps, parameters))
    return None


def _names_that_differ(steps: list[Step], of: str, ignored: set[str]) -> list[str]:
    names = steps[0].names
    places = differing([getattr(step, of) or [] for step in steps])
    return [names[place] for place in places if names[place] not in ignored]


# --- which ranks hold the same model


def _replicas(seen: Observation) -> list[list[RankSeen]]:
    """Groups of ranks between which DDP reduces; without DDP, all ranks."""
    groups = {tuple(wrap.ranks) for rank in seen.ranks for wrap in wraps(rank) if wrap.ranks}
    if not groups:
        return [seen.ranks] if not any(wraps(rank) for rank in seen.ranks) else []
    return [
        [rank for rank in seen.ranks if rank.rank in group]
        for group in sorted(groups)
        if len(group) > 1
    ]


def _common_steps(ranks: list[RankSeen]) -> Iterator[list[Step]]:
    """The steps that every rank has digests of, for the same parameters."""
    tables = [
        {(s.optimizer, s.number): s for s in rank.steps if s.gradients and s.parameters}
        for rank in ranks
    ]
    for key in tables[0] if tables else ():
        steps = [table[key] for table in tables if key in table]
        if len(steps) == len(ranks) and all(step.names == steps[0].names for step in steps):
            yield steps


def _is_of_another_group(ranks: list[RankSeen], step: Step) -> bool:
    """Does the step belong to a model that DDP keeps equal between other ranks?"""
    group = {rank.rank for rank in ranks}
    return any(
        set(step.names) <= set(wrap.names)
        for wrap in wraps(ranks[0])
        if wrap.ranks and set(wrap.ranks) != group
    )


def _train_one_model(rank: RankSeen, step: Step) -> bool:
    """Do the ranks train together, under DDP or by exchanging gradients? Otherwise each may train
    its own model from the same seed and data."""
    if not any(value and value[0] for value in step.gradients or []):
        return False
    return bool(wraps(rank)) or any(e.t < step.t and _exchanges(e) for e in rank.of(Collective))


def _exchanges(event: Collective) -> bool:
    """Does every rank contribute a tensor?"""
    return event.op not in RECEIVE and event.shape not in (None, [], [1])


# --- who stepped


def _unequal_steps(seen: Observation) -> Finding | None:
    """All ranks compute the same passes, but not all of them step."""
    exchange = (any(map(_exchanges, rank.of(Collective))) for rank in seen.ranks)
    if not is_data_parallel(seen) and not all(exchange):
        return None
    # In a long run, each rank records other passes after the first steps.
    is_long = any(rank.made > ALL_WATCHED for rank in seen.ranks)
    finished = seen.over and not seen.ended_by_us and not is_long
    finished = finished and all(rank.came_to_its_end and not rank.raised for rank in seen.ranks)
    passes = [[one for one in rank.of(Backward) if one.step < ALL_WATCHED] for rank in seen.ranks]
    fewest, most_passes = min(map(len, passes)), max(map(len, passes))
    if not fewest or (most_passes - fewest > (0 if finished else 1) and not is_long):
        return None
    # Running ranks are not read at the same moment: count what each did before the same pass.
    until = [math.inf if finished else mine[fewest - 1].t for mine in passes]
    made = {
        rank.rank: sum(step.t < end for step in rank.steps)
        + sum(bool(event.skipped) and event.t < end for event in rank.of(Amp))
        for rank, end in zip(seen.ranks, until, strict=True)
    }
    gap = max(made.values()) - min(made.values())
    if gap < (1 if finished else 2):
        return None
    most = max(seen.ranks, key=lambda rank: made[rank.rank])
    fewer = [rank for rank, count in made.items() if count < made[most.rank]]
    sent = [e for e in most.of(Collective) if e.op in RECEIVE and e.shape not in (None, [], [1])]
    less = f"only {made[fewer[0]]}" if made[fewer[0]] else "none"
    why = (
        f"Rank {most.rank} takes {made[most.rank]} optimizer steps here in {fewest} backward passes, "
        f"rank {listed([str(rank) for rank in fewer])} {less}. Every rank has the averaged gradients; "
        "ranks that do not apply them keep old parameters."
    )
    if len(sent) >= gap:
        why += " Certain unless the tensors that the script sends give them the result."
    return found(
        "S08",
        "suspect" if len(sent) >= gap else "error",
        why,
        "Step on every rank: move the call out of the test on the rank.",
        place_of(most.steps[0] if most.steps else None),
        [f"rank {rank}: {count} optimizer steps" for rank, count in made.items()],
        fewer[0] if len(fewer) == 1 else None,
    )


# --- gradients differ before the step


def _explain_gradients(apart: Apart) -> Finding | None:
    wrapped = {name for rank in apart.ranks for wrap in wraps(rank) for name in wrap.names}
    if not wrapped:
        return None  # ranks that train alone, or average by hand in a way that we cannot follow
    inside = [name for name in apart.names if name in wrapped]
    if not inside:
        return _outside(apart)
    if find_unused(apart.seen) or find_changed_graph(apart.seen):
        return None  # DDP did not finish averaging and says so in the next forward
    synced = any(e.seq and e.seq[1] >= e.seq[0] for e in apart.ranks[0].of(Backward))
    if _averages_by_hand(apart.ranks[0]) or not (apart.seen.over or synced):
        return None  # local steps; the ranks average parameters now and then, or still may
    apart = Apart(apart.seen, apart.ranks, apart.steps, inside)
    causes: tuple[Callable[[Apart], Finding | None], ...]
    causes = (_past_the_wrapper, _too_early, _not_synced, _unfrozen, _moved, _also_past)
    for cause in causes:
        if finding := cause(apart):
            return finding
    why = (
        f"Before step {apart.number} the gradients of {listed(inside)} differ between ranks, although "
        "the model went through DDP. Nothing that was observed explains it; the replicas drift apart "
        "from here on."
    )
    fix = (
        "Check what changes the gradients between backward and this step on each rank: hooks, "
        "clipping by a local norm, noise."
    )
    place = place_of(apart.steps[0])
    return found("S08", "error", why, fix, place, apart.norms("gradients"))


def _averages_by_hand(rank: RankSeen) -> bool:
    """Did the user's all_reduce calls have the shapes of all parameters, or their total size?"""
    calls = [event.shape for event in rank.of(Collective) if event.op == "all_reduce"]
    reduced = [shape for shape in calls if shape]
    for wrap in wraps(rank):
        total = sum(math.prod(shape) for shape in wrap.shapes)
        if all(shape in reduced for shape in wrap.shapes) or total in map(math.prod, reduced):
            return True
    return False


def _outside(apart: Apart) -> Finding:
    why = (
        f"The optimizer also steps {listed(apart.names)}, which no DDP model holds. Their gradients "
        "differ between ranks, so each rank trains its own. Certain if they should be equal."
    )
    fix = "Put them into the module that DDP wraps, or all-reduce their gradients before the step."
    place = place_of(apart.steps[0])
    return found("S08", "suspect", why, fix, place, apart.norms("gradients"))


def _forwards(window: Window | None) -> list[Forward]:
    passes = window.micro_steps if window else []
    return [forward for one in passes for forward in one.forwards if forward.grad]


def _culprit(apart: Apart, guilty: list[RankSeen]) -> int | None:
    """The rank to blame, if it is one of several."""
    return guilty[0].rank if len(guilty) == 1 < len(apart.ranks) else None


def _past_the_wrapper(apart: Apart) -> Finding | None:
    """No forward before the step went through DDP."""
    guilty = [
        (rank, window)
        for rank in apart.ranks
        if (window := apart.window(rank))
        and window.micro_steps
        and not any(forward.through == "wrapper" for forward in _forwards(window))
    ]
    if not guilty:
        return None
    window = guilty[0][1]
    past = [forward for forward in _forwards(window) if forward.through == "module"]
    way = (
        "calls the module inside DDP"
        if past
        else "uses a part or a method of the module inside DDP"
    )
    why = (
        f"The forward of step {apart.number} {way}. DDP.forward does not run, so DDP does not average: "
        f"the gradients of {listed(apart.names)} differ between ranks."
    )
    fix = "Call the wrapper: model(x), not model.module(x). Let forward choose other methods by an argument."
    place = place_of(past[0] if past else window.micro_steps[-1].backward)
    rank = _culprit(apart, [rank for rank, _ in guilty])
    return found("S06", "error", why, fix, place, apart.norms("gradients"), rank)


def _not_synced(apart: Apart) -> Finding | None:
    """The last pass before the step was inside no_sync()."""
    guilty = []
    for rank in apart.ranks:
        window = apart.window(rank)
        forwards = [forward for forward in _forwards(window) if forward.through == "wrapper"]
        if window and forwards and forwards[-1].sync is False:
            guilty.append((rank, window, forwards[-1]))
    if not guilty:
        return None
    rank, window, forward = guilty[0]
    own = [e for e in rank.of(Collective) if e.op == "all_reduce" and e.shape not in ([], [1])]
    severity: Severity = "suspect" if own else "error"
    doubt = " Certain unless your own all_reduce calls average the parameters later." if own else ""
    backward = window.micro_steps[-1].backward
    evidence = apart.norms("gradients")
    culprit = _culprit(apart, [rank for rank, _, _ in guilty])
    if forward.model not in backward.unsynced:
        why = (
            f"The forward at {forward.site} is inside no_sync() and this backward is outside. DDP goes "
            f"by the forward, so step {apart.number} uses gradients of {listed(apart.names)} that are "
            f"not averaged.{doubt}"
        )
        fix = (
            "Put forward and backward into the same context: both inside no_sync() in early "
            "micro-batches, both outside in the last."
        )
        return found("G05", severity, why, fix, place_of(backward), evidence, culprit)
    why = (
        f"Step {apart.number} applies gradients that were never averaged: the last of its "
        f"{len(window.micro_steps)} passes (forward at {forward.site}) was inside no_sync(). "
        f"{listed(apart.names)} differ between ranks from now on.{doubt}"
    )
    fix = (
        "Leave no_sync() in the last pass before every step, also for the last batch of the loader."
    )
    return found("G04", severity, why, fix, place_of(apart.steps[0]), evidence, culprit)


def _too_early(apart: Apart) -> Finding | None:
    """All forwards came first: the last one prepared DDP, and the first backward used that up."""
    for rank in apart.ranks:
        window = apart.window(rank)
        passes = window.micro_steps if window else []
        first = (
            [f for f in passes[0].forwards if f.grad and f.through == "wrapper"] if passes else []
        )
        quiet = any(f.sync is False for f in first) or any(p.backward.unsynced for p in passes)
        sequences = [one.backward.seq for one in passes]
        sent = [bool(seq and seq[1] >= seq[0]) for seq in sequences]
        synced = any(forward.sync for forward in first)
        if len(first) < 2 or not quiet or not synced or not any(sent) or all(sent):
            continue
        early = sent.index(True)
        why = (
            f"{len(first)} forwards run before the first backward, and only the forward is inside "
            f"no_sync(). Backward {early + 1} of {len(passes)} exchanged its gradients; those of the "
            f"{len(passes) - 1 - early} after it stay on their rank, so {listed(apart.names)} differ "
            f"at step {apart.number}."
        )
        fix = "Use one no_sync() block around forward and backward of a micro-batch, then the next."
        counts = f"rank {rank.rank}: collectives in {sum(sent)} of {len(passes)} backward passes"
        evidence = [*apart.norms("gradients"), counts]
        return found("P06", "error", why, fix, place_of(passes[early].backward), evidence)
    return None


def _unfrozen(apart: Apart) -> Finding | None:
    """The parameters were frozen at the time of wrapping, so DDP does not know them."""
    rank = apart.ranks[0]
    frozen = {
        name
        for wrap in wraps(rank)
        for name, is_on in zip(wrap.names, wrap.trainable, strict=True)
        if not is_on
    }
    if not frozen.issuperset(apart.names):
        return None
    changes = [e for e in rank.of(Trainable) if e.trainable and e.name in apart.names]
    why = (
        f"{listed(apart.names)} were frozen when DDP was created and are unfrozen here. DDP averages "
        f"only what was trainable then: from step {apart.number} on, every rank trains them on its "
        "own data."
    )
    fix = (
        "Unfreeze before DistributedDataParallel(…), or wrap again after unfreezing and create a new "
        "optimizer."
    )
    place = place_of(changes[0] if changes else apart.steps[0])
    return found("S07", "error", why, fix, place, apart.norms("gradients"))


def _moved(apart: Apart) -> Finding | None:
    moves = [event for event in apart.ranks[0].of(Moved) if event.t < apart.steps[0].t]
    if not moves:
        return None
    why = (
        f"The wrapped model moves here (from {moves[0].before} to {moves[0].after}), which replaces "
        f"the tensors that DDP has hooks on. The gradients of {listed(apart.names)} are no longer "
        f"averaged at step {apart.number}."
    )
    fix = "Copy the state_dict to the CPU instead of the model, or wrap again after moving."
    return found("S12", "error", why, fix, place_of(moves[0]), apart.norms("gradients"))


def _also_past(apart: Apart) -> Finding | None:
    """Some of the forwards before the step went past the wrapper."""
    past = [f for f in _forwards(apart.window(apart.ranks[0])) if f.through == "module"]
    if not past:
        return None
    why = (
        "This forward calls the module inside DDP, besides others that use the wrapper. DDP does not "
        f"average its part of the gradients of {listed(apart.names)} at step {apart.number}."
    )
    fix = "Do both in one call of the wrapper; bypass it only without gradients."
    return found("S06", "error", why, fix, place_of(past[0]), apart.norms("gradients"))


# --- gradients agree, parameters do not


def _explain_parameters(apart: Apart) -> Finding:
    evidence, step = apart.norms("parameters"), apart.steps[0]
    names = listed(apart.names)
    rates = [tuple(each.lr) for each in apart.steps]
    if len(set(rates)) > 1:
        changes = [event for event in apart.ranks[0].of(Scheduled) if event.t < step.t]
        shown = "; ".join(
            f"rank {rank.rank}: {', '.join(f'{rate:g}' for rate in lr if rate is not None)}"
            for rank, lr in zip(apart.ranks, rates, strict=True)
        )
        why = (
            f"At step {apart.number} all ranks have the same gradients but different learning rates "
            f"({shown}), so {names} drift apart. Something local, such as a rank's own loss, sets the "
            "rate."
        )
        fix = "Let the same number decide on all ranks: all_reduce the metric before scheduler.step(metric)."
        return found("S08", "error", why, fix, place_of(changes[-1] if changes else step), evidence)
    loads = [r for r in apart.ranks if any(e.model is not None for e in r.of(LoadState))]
    if loads and len(loads) < len(apart.ranks):
        why = (
            f"Only rank {listed([str(rank.rank) for rank in loads])} loaded a state into the wrapped "
            f"model, after DDP had made all ranks equal. {names} differ from then on."
        )
        fix = "Load before DistributedDataParallel(…), or on every rank."
        place, culprit = place_of(loads[0].of(LoadState)[0]), _culprit(apart, loads)
        return found("S08", "error", why, fix, place, evidence, culprit)
    if any(wraps(rank) for rank in apart.ranks) or apart.number > 1:
        why = (
            f"After step {apart.number}, {names} differ between ranks although gradients and learning "
            "rates are equal. Some ranks changed them before this step or in it."
        )
        fix = "Change parameters in the same way on all ranks, or before creating DDP."
        return found("S08", "error", why, fix, place_of(step), evidence)
    reduced = [e for e in apart.ranks[0].of(Collective) if e.op == "all_reduce" and e.t < step.t]
    why = (
        f"The ranks apply the same averaged gradients but started with different parameters ({names}). "
        "The difference never disappears: every rank trains its own model."
    )
    fix = "Before the first step: for p in model.parameters(): dist.broadcast(p.detach(), src=0); buffers too."
    return found("S11", "error", why, fix, place_of(reduced[-1] if reduced else step), evidence)
