"""Replicas that come apart. Many mistakes end in differing parameters; this finds the first step in
which ranks disagree, and names the one cause: who stepped, which way the forward went, what no_sync
covered, what was unfrozen, moved or loaded."""

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

ALL_WATCHED = 64  # steps, from the first on, of which everything is known
# Calls in which no rank, or one alone, has anything to give.
TAKEN = {"broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier", "monitored_barrier"} | {
    "send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv",
}  # fmt: skip


@dataclass(frozen=True)
class Apart:
    """The first step that ranks do not agree about. `names`: the parameters in which they
    differ."""

    seen: Observation
    ranks: list[RankSeen]
    steps: list[Step]  # one of each rank
    names: list[str]

    @property
    def number(self) -> int:
        return self.steps[0].number

    def window(self, rank: RankSeen) -> Window | None:
        step = self.steps[self.ranks.index(rank)]
        return next((window for window in windows(rank) if window.step is step), None)

    def norms(self, of: str) -> tuple[str, ...]:
        """The evidence: the norm of the first differing tensor on each rank."""
        place = self.steps[0].names.index(self.names[0])
        values = [
            (rank.rank, (getattr(step, of) or [])[place])
            for rank, step in zip(self.ranks, self.steps, strict=True)
        ]
        told = [
            f"rank {rank}: norm {value[0]:.6g}" if value else f"rank {rank}: none"
            for rank, value in values
        ]
        return (f"{of} of {self.names[0]} at step {self.number}: {'; '.join(told)}",)


@lru_cache(maxsize=1)  # asked once for each entry
def find_cause(seen: Observation) -> Finding | None:
    if (
        len(seen.ranks) < 2
        or not watched(seen)
        or any(rank.of(Pipeline) or rank.of(Join) for rank in seen.ranks)
    ):
        return None  # another part of the model on each; or uneven data, and step 7 of one rank is not step 7 of another
    if uneven := _unequal_steps(seen):
        return uneven
    for ranks in _replicas(seen):
        common = [
            steps for steps in _common_steps(ranks) if not _is_of_another_group(ranks, steps[0])
        ]
        ignored = {name for wrap in wraps(ranks[0]) for name in wrap.ignored}
        for steps in (
            common if seen.settled else common[:-1]
        ):  # what comes after the last step may explain it: an exception
            names = steps[0].names
            gradients = [
                i
                for i in differing([step.gradients or [] for step in steps])
                if names[i] not in ignored
            ]
            if gradients:
                apart = Apart(seen, ranks, steps, [names[i] for i in gradients])
                return _explain_gradients(apart)
            parameters = [
                i
                for i in differing([step.parameters or [] for step in steps])
                if names[i] not in ignored
            ]
            if parameters and _is_common(ranks[0], steps[0]):
                return _explain_parameters(
                    Apart(seen, ranks, steps, [names[i] for i in parameters])
                )
    return None


# --- who is compared with whom
# ---------------------------------------------------------------------------------------------------


def _replicas(seen: Observation) -> list[list[RankSeen]]:
    """Ranks that hold the same model: those between which DDP reduces; without DDP, all."""
    groups = {tuple(wrap.ranks) for rank in seen.ranks for wrap in wraps(rank) if wrap.ranks}
    if not groups:
        return [seen.ranks] if not any(wraps(rank) for rank in seen.ranks) else []
    return [
        [rank for rank in seen.ranks if rank.rank in group]
        for group in sorted(groups)
        if len(group) > 1
    ]


def _common_steps(ranks: list[RankSeen]) -> Iterator[list[Step]]:
    """The steps of which all ranks have digests, of the same parameters."""
    tables = [
        {
            (step.optimizer, step.number): step
            for step in rank.steps
            if step.gradients and step.parameters
        }
        for rank in ranks
    ]
    for key in tables[0] if tables else ():
        steps = [table[key] for table in tables if key in table]
        if len(steps) == len(ranks) and all(step.names == steps[0].names for step in steps):
            yield steps


def _is_of_another_group(ranks: list[RankSeen], step: Step) -> bool:
    """What it steps may be a model that DDP holds equal between other ranks, or on one alone."""
    group = {rank.rank for rank in ranks}
    return any(
        set(step.names) <= set(wrap.names)
        for wrap in wraps(ranks[0])
        if wrap.ranks and set(wrap.ranks) != group
    )


def _is_common(rank: RankSeen, step: Step) -> bool:
    """The ranks train one model: under DDP, or with gradients that they give to each other. Others
    may begin with the same seed and the same data, and go their own ways."""
    if not any(value and value[0] for value in step.gradients or []):
        return False
    return bool(wraps(rank)) or any(
        e.t < step.t and _exchanges_tensors(e) for e in rank.of(Collective)
    )


def _exchanges_tensors(event: Collective) -> bool:
    """All ranks give something to it; of a broadcast or a scatter they only take: data, first
    weights."""
    return event.op not in TAKEN and event.shape not in (None, [], [1])


# --- who stepped
# -----------------------------------------------------------------------------------------------------------------


def _unequal_steps(seen: Observation) -> Finding | None:
    """All ranks compute the same passes, but not all apply them."""
    if not is_data_parallel(seen) and not all(
        any(map(_exchanges_tensors, rank.of(Collective))) for rank in seen.ranks
    ):
        return None
    is_long = any(
        rank.made > ALL_WATCHED for rank in seen.ranks
    )  # then of later passes not all are known, and on each rank others
    in_order = (
        seen.over
        and not seen.ended_by_us
        and not is_long
        and all(rank.came_to_its_end and not rank.raised for rank in seen.ranks)
    )
    passes = [[one for one in rank.of(Backward) if one.step < ALL_WATCHED] for rank in seen.ranks]
    fewest = min(map(len, passes))
    if not fewest or (max(map(len, passes)) - fewest > (0 if in_order else 1) and not is_long):
        return None
    # Ranks that run are not read at the same moment, and need not wait for each other: what each
    # did before the same pass counts.
    until = [float("inf") if in_order else mine[fewest - 1].t for mine in passes]
    made = {
        rank.rank: sum(step.t < end for step in rank.steps)
        + sum(bool(event.skipped) and event.t < end for event in rank.of(Amp))
        for rank, end in zip(seen.ranks, until, strict=True)
    }
    gap = max(made.values()) - min(made.values())
    if gap < (1 if in_order else 2):
        return None
    most = max(seen.ranks, key=lambda rank: made[rank.rank])
    fewer = [rank for rank, count in made.items() if count < made[most.rank]]
    shared = sum(
        event.op in TAKEN and event.shape not in (None, [], [1]) for event in most.of(Collective)
    )
    unsure = shared >= gap
    certain = (
        "; tensors are sent, which may give them the result: certain if parameters differ at the end"
        if unsure
        else ""
    )
    return found(
        "S08",
        "suspect" if unsure else "error",
        f"this step is made by rank {most.rank} ({made[most.rank]} times in {fewest} backward passes), but "
        f"{'only ' + str(made[fewer[0]]) + ' times' if made[fewer[0]] else 'never'} by rank {listed([str(r) for r in fewer])}: "
        f"every rank has the averaged gradients, and those that do not apply them keep old parameters{certain}",
        "step on every rank: take the call out of the condition on the rank",
        place_of(most.steps[0] if most.steps else None),
        [f"rank {rank}: {count} optimizer steps" for rank, count in made.items()],
        fewer[0] if len(fewer) == 1 else None,
    )


# --- gradients differ before the step
# --------------------------------------------------------------------------------------------


def _explain_gradients(apart: Apart) -> Finding | None:
    wrapped = {name for rank in apart.ranks for wrap in wraps(rank) for name in wrap.names}
    if not wrapped:
        return None  # ranks that train on their own, or an averaging by hand that we cannot follow
    inside = [name for name in apart.names if name in wrapped]
    if not inside:
        return _outside(apart)
    apart = Apart(apart.seen, apart.ranks, apart.steps, inside)
    if find_unused(apart.seen) or find_changed_graph(apart.seen):
        return None  # DDP never finished averaging, and says so in the next forward
    if _are_averaged_by_hand(apart.ranks[0]) or not (
        apart.seen.over or _was_ever_synced(apart.ranks[0])
    ):
        return None  # each rank steps alone for a while, and parameters are averaged then: or it may still come
    explain: tuple[Callable[[Apart], Finding | None], ...]
    explain = (_past_the_wrapper, _too_early, _not_synced, _unfrozen, _moved, _also_past)
    return next((finding for one in explain if (finding := one(apart)) is not None), None) or found(
        "S08",
        "error",
        f"before optimizer step {apart.number} the gradients of {listed(apart.names)} are not the same on all ranks, although the "
        "model went through DDP and nothing that was seen explains it: the replicas come apart from here on",
        "look at what happens to the gradients between backward and this step on each rank (hooks, clipping by local norms, noise)",
        place_of(apart.steps[0]),
        apart.norms("gradients"),
    )


def _are_averaged_by_hand(rank: RankSeen) -> bool:
    """The user's own all_reduce calls had the shapes of all parameters, or of all of them in
    one."""
    reduced = [
        event.shape for event in rank.of(Collective) if event.op == "all_reduce" and event.shape
    ]
    for wrap in wraps(rank):
        total = sum(math.prod(shape) for shape in wrap.shapes)
        if all(shape in reduced for shape in wrap.shapes) or any(
            math.prod(shape) == total for shape in reduced
        ):
            return True
    return False


def _was_ever_synced(rank: RankSeen) -> bool:
    return any(event.seq and event.seq[1] >= event.seq[0] for event in rank.of(Backward))


def _outside(apart: Apart) -> Finding:
    return found(
        "S08",
        "suspect",
        f"the optimizer also steps {listed(apart.names)} of {len(apart.steps[0].names)} parameters that no DDP model holds, and "
        "their gradients differ between ranks, so every rank trains its own. Certain if they are meant to be the same everywhere",
        "put them into the module that is given to DDP, or all-reduce their gradients before the step",
        place_of(apart.steps[0]),
        apart.norms("gradients"),
    )


def _forwards(window: Window) -> list[Forward]:
    return [forward for one in window.micro_steps for forward in one.forwards if forward.grad]


def _some(apart: Apart, guilty: list[RankSeen]) -> int | None:
    """The culprit, where it is one rank of several."""
    return guilty[0].rank if len(guilty) == 1 < len(apart.ranks) else None


def _past_the_wrapper(apart: Apart) -> Finding | None:
    """No forward of the window went through DDP."""
    guilty = []
    for rank in apart.ranks:
        window = apart.window(rank)
        if (
            window
            and window.micro_steps
            and not any(forward.through == "wrapper" for forward in _forwards(window))
        ):
            guilty.append((rank, window))
    if not guilty:
        return None
    rank, window = guilty[0]
    past = [forward for forward in _forwards(window) if forward.through == "module"]
    way = (
        "calls the module inside DDP"
        if past
        else "starts from a part or a method of the module inside DDP: no forward of the wrapper came before it"
    )
    return found(
        "S06",
        "error",
        f"the forward pass of step {apart.number} {way}, so DDP was never told of it and does not average: the gradients of "
        f"{listed(apart.names)} differ between ranks",
        "call the wrapper itself: model(x), not model.module(x); let forward choose by an argument where another method is wanted",
        place_of(past[0] if past else window.micro_steps[-1].backward),
        apart.norms("gradients"),
        _some(apart, [rank for rank, _ in guilty]),
    )


def _not_synced(apart: Apart) -> Finding | None:
    """The last pass of the window was inside no_sync when DDP looked."""
    guilty = []
    for rank in apart.ranks:
        window = apart.window(rank)
        forwards = [f for f in _forwards(window) if f.through == "wrapper"] if window else []
        if window and forwards and forwards[-1].sync is False:
            guilty.append((rank, window, forwards[-1]))
    if not guilty:
        return None
    rank, window, forward = guilty[0]
    by_hand = any(
        event.op == "all_reduce" and event.shape not in ([], [1]) for event in rank.of(Collective)
    )
    severity: Severity = "suspect" if by_hand else "error"
    unsure = (
        ". Certain unless your own all_reduce calls average the parameters later" if by_hand else ""
    )
    backward = window.micro_steps[-1].backward
    culprit = _some(apart, [rank for rank, _, _ in guilty])
    if forward.model not in backward.unsynced:
        why = (
            f"the forward at {forward.site} is inside no_sync() and this backward is outside: DDP looks at the forward, so the "
            f"gradients of {listed(apart.names)} are not averaged at step {apart.number}{unsure}"
        )
        fix = "put forward and backward into the same context: both inside no_sync() in early micro-batches, both outside in the last"
        return found(
            "G05", severity, why, fix, place_of(backward), apart.norms("gradients"), culprit
        )
    why = (
        f"step {apart.number} applies gradients that were never averaged: the last of its {len(window.micro_steps)} passes "
        "(forward at "
        f"{forward.site}) was inside no_sync(), so {listed(apart.names)} differ between ranks, and stay different{unsure}"
    )
    fix = "leave no_sync() for the pass before every step, also for the last batch of the loader"
    return found(
        "G04", severity, why, fix, place_of(apart.steps[0]), apart.norms("gradients"), culprit
    )


def _too_early(apart: Apart) -> Finding | None:
    """All forwards came first: the last of them made DDP ready, and the first backward used it
    up."""
    for rank in apart.ranks:
        window = apart.window(rank)
        passes = window.micro_steps if window else []
        first = (
            [
                forward
                for forward in passes[0].forwards
                if forward.grad and forward.through == "wrapper"
            ]
            if passes
            else []
        )
        asked = any(forward.sync is False for forward in first) or any(
            one.backward.unsynced for one in passes
        )
        sent = [
            bool(one.backward.seq and one.backward.seq[1] >= one.backward.seq[0]) for one in passes
        ]
        if (
            len(first) < 2
            or not asked
            or not any(forward.sync for forward in first)
            or not any(sent)
            or all(sent)
        ):
            continue
        early = passes[sent.index(True)].backward
        local = len(passes) - 1 - sent.index(True)
        return found(
            "P06",
            "error",
            f"{len(first)} forwards come before the first backward, and no_sync() is asked in the forward only: one of them made "
            f"DDP ready, and backward {sent.index(True) + 1} of {len(passes)} exchanged its gradients; those of the {local} after "
            f"it stay on each rank, so {listed(apart.names)} differ at step {apart.number}",
            "one no_sync() block around forward and backward of a micro-batch, the next micro-batch after it",
            place_of(early),
            [
                *apart.norms("gradients"),
                f"rank {rank.rank}: collectives in {sum(sent)} of {len(passes)} backward passes",
            ],
        )
    return None


def _unfrozen(apart: Apart) -> Finding | None:
    """They were frozen when DDP was made, so DDP does not know them."""
    rank = apart.ranks[0]
    frozen = {
        name
        for wrap in wraps(rank)
        for name, on in zip(wrap.names, wrap.trainable, strict=True)
        if not on
    }
    if not frozen.issuperset(apart.names):
        return None
    changes = [
        event for event in rank.of(Trainable) if event.trainable and event.name in apart.names
    ]
    return found(
        "S07",
        "error",
        f"{listed(apart.names)} were frozen when DDP was made and unfrozen here: DDP averages only what it knew then, so from step "
        f"{apart.number} on every rank trains them on its own data",
        "unfreeze before DistributedDataParallel(…), or wrap the module again after unfreezing (and make a new optimizer)",
        place_of(changes[0] if changes else apart.steps[0]),
        apart.norms("gradients"),
    )


def _moved(apart: Apart) -> Finding | None:
    moves = [event for event in apart.ranks[0].of(Moved) if event.t < apart.steps[0].t]
    if not moves:
        return None
    return found(
        "S12",
        "error",
        f"the wrapped model was moved here (from {moves[0].before} to {moves[0].after}), which puts new tensors under DDP's hooks: "
        f"the gradients of {listed(apart.names)} are no longer averaged at step {apart.number}",
        "copy the state_dict to the CPU instead of the model, or wrap again after moving",
        place_of(moves[0]),
        apart.norms("gradients"),
    )


def _also_past(apart: Apart) -> Finding | None:
    """Some of the window's forwards went past the wrapper."""
    window = apart.window(apart.ranks[0])
    past = (
        [forward for forward in _forwards(window) if forward.through == "module"] if window else []
    )
    if not past:
        return None
    return found(
        "S06",
        "error",
        f"this forward calls the module inside DDP, besides others that go through the wrapper: its part of the gradients of "
        f"{listed(apart.names)} is not averaged at step {apart.number}",
        "one call of the wrapper that does both; past the wrapper only without gradients",
        place_of(past[0]),
        apart.norms("gradients"),
    )


# --- gradients agree, parameters do not
# ------------------------------------------------------------------------------------------


def _explain_parameters(apart: Apart) -> Finding:
    rates = {rank.rank: tuple(step.lr) for rank, step in zip(apart.ranks, apart.steps, strict=True)}
    evidence = apart.norms("parameters")
    if len(set(rates.values())) > 1:
        changes = [event for event in apart.ranks[0].of(Scheduled) if event.t < apart.steps[0].t]
        told = "; ".join(
            f"rank {rank}: {', '.join(f'{rate:g}' for rate in lr if rate is not None)}"
            for rank, lr in rates.items()
        )
        why = (
            f"at step {apart.number} all ranks have the same gradients but different learning rates ({told}), so "
            f"{listed(apart.names)} "
            "come apart: something local, such as a rank's own loss, decides about the rate"
        )
        fix = "let the same number decide on all ranks: all_reduce the metric before scheduler.step(metric)"
        return found(
            "S08", "error", why, fix, place_of(changes[-1] if changes else apart.steps[0]), evidence
        )
    loads = [
        rank for rank in apart.ranks if any(event.model is not None for event in rank.of(LoadState))
    ]
    if loads and len(loads) < len(apart.ranks):
        load = loads[0].of(LoadState)[0]
        why = (
            f"only rank {listed([str(rank.rank) for rank in loads])} loaded a state into the wrapped model, after DDP had "
            "given all "
            f"ranks the same parameters: {listed(apart.names)} differ from then on"
        )
        fix = "load before DistributedDataParallel(…), or on every rank"
        return found(
            "S08",
            "error",
            why,
            fix,
            place_of(load),
            evidence,
            loads[0].rank if len(loads) == 1 else None,
        )
    if not any(wraps(rank) for rank in apart.ranks):
        return _different_beginnings(apart, evidence)
    why = (
        f"after step {apart.number} {listed(apart.names)} are not the same on all ranks, although gradients and learning rates "
        "are; "
        "nothing that was seen explains it: they were changed on some ranks only, before this step or in it"
    )
    return found(
        "S08",
        "error",
        why,
        "change parameters on all ranks in the same way, or before DDP is made",
        place_of(apart.steps[0]),
        evidence,
    )


def _different_beginnings(apart: Apart, evidence: tuple[str, ...]) -> Finding:
    reductions = [
        e for e in apart.ranks[0].of(Collective) if e.op == "all_reduce" and e.t < apart.steps[0].t
    ]
    if apart.number > 1:
        why = f"parameters differ after step {apart.number} although all gradients were the same, and no DDP keeps them together"
        return found(
            "S08",
            "error",
            why,
            "change parameters on all ranks alike",
            place_of(apart.steps[0]),
            evidence,
        )
    why = (
        f"the ranks apply the same averaged gradients, but began with different parameters ({listed(apart.names)}): averaging "
        "keeps "
        "the difference for ever, and every rank trains another model"
    )
    fix = "before the first step: for p in model.parameters(): dist.broadcast(p.detach(), src=0); the same for buffers"
    return found(
        "S11",
        "error",
        why,
        fix,
        place_of(reductions[-1] if reductions else apart.steps[0]),
        evidence,
    )
