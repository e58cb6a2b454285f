"""Find why replicas drift apart: the first step in which ranks disagree, and its cause.

Many mistakes lead to different parameters: a step that some ranks skip, a forward that bypasses
DDP, or no_sync() around the wrong passes. Others unfreeze, move, or load parameters after wrapping.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from paralab.analyse.collective_matching import DEFAULT_GROUP
from paralab.doctor.events import (
    Amp,
    Backward,
    Collective,
    Group,
    Join,
    Loader,
    LoadState,
    Pipeline,
    Scheduled,
    Step,
)
from paralab.doctor.failures.semantics.gradients import Drift, culprit, explain_gradients
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import (
    ddp_wraps,
    differing,
    is_data_parallel,
    listed,
    make_finding,
    watched,
)
from paralab.doctor.registry import Finding
from paralab.doctor.windows import windows

ALL_WATCHED = 64  # ranks record everything in this many first steps
# Collectives in which some ranks only receive.
RECEIVE = {
    "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier",
    "monitored_barrier", "send", "recv", "isend", "irecv", "send_object_list",
    "recv_object_list", "batch_isend_irecv",
}  # fmt: skip


@lru_cache(maxsize=1)
def find_cause(seen: Observation) -> Finding | None:
    """Report the cause of the first difference between the ranks' gradients or parameters."""
    if len(seen.ranks) < 2 or not watched(seen):
        return None
    if any(rank.of(Pipeline) or rank.of(Join) for rank in seen.ranks):
        return None  # ranks have different stages, or different numbers of steps
    if uneven := _unequal_steps(seen):
        return uneven
    for ranks in _replicas(seen):
        common = [s for s in _common_steps(ranks) if not _is_of_another_group(ranks, s[0])]
        ignored = {name for wrap in ddp_wraps(ranks[0]) for name in wrap.ignored}
        # Something after the last step, such as an exception, may explain the difference.
        for steps in common if seen.settled else common[:-1]:
            gradients = _names_that_differ(steps, "gradients", ignored)
            if gradients:
                drift = Drift(seen, ranks, steps, gradients)
                return explain_gradients(drift) if ddp_wraps(ranks[0]) else _never_averaged(drift)
            parameters = _names_that_differ(steps, "parameters", ignored)
            if parameters and _train_one_model(ranks[0], steps[0]):
                return _explain_parameters(Drift(seen, ranks, steps, parameters))
    return None


def _names_that_differ(steps: list[Step], of: str, ignored: set[str]) -> list[str]:
    names = steps[0].names
    places = differing([getattr(step, of) or [] for step in steps])
    return [names[place] for place in places if names[place] not in ignored]


# --- which ranks hold the same model


def _replicas(seen: Observation) -> list[list[WatchedRank]]:
    """Return the groups of ranks between which DDP reduces; without DDP, all ranks."""
    groups = {tuple(wrap.ranks) for rank in seen.ranks for wrap in ddp_wraps(rank) if wrap.ranks}
    if not groups:
        return [seen.ranks] if not any(ddp_wraps(rank) for rank in seen.ranks) else []
    several = [group for group in sorted(groups) if len(group) > 1]
    return [[rank for rank in seen.ranks if rank.rank in group] for group in several]


def _common_steps(ranks: list[WatchedRank]) -> Iterator[list[Step]]:
    """Yield the steps for which every rank has digests of the same parameters."""
    tables = [
        {(s.optimizer, s.number): s for s in rank.steps if s.gradients and s.parameters}
        for rank in ranks
    ]
    for key in tables[0] if tables else ():
        steps = [table[key] for table in tables if key in table]
        if len(steps) == len(ranks) and all(step.names == steps[0].names for step in steps):
            yield steps


def _is_of_another_group(ranks: list[WatchedRank], step: Step) -> bool:
    """Return whether the step belongs to a model that DDP synchronizes between other ranks."""
    group = {rank.rank for rank in ranks}
    others = [wrap for wrap in ddp_wraps(ranks[0]) if wrap.ranks and set(wrap.ranks) != group]
    return any(set(step.names) <= set(wrap.names) for wrap in others)


def _train_one_model(rank: WatchedRank, step: Step) -> bool:
    """Return whether the ranks train together, under DDP or by exchanging gradients. Otherwise,
    each rank may train its own model from the same seed and data."""
    if not any(value and value[0] for value in step.gradients or []):
        return False
    return bool(ddp_wraps(rank)) or any(e.t < step.t and _exchanges(e) for e in rank.of(Collective))


def _exchanges(event: Collective) -> bool:
    return event.op not in RECEIVE and event.shape not in (None, [], [1])


# --- which ranks stepped


def _unequal_steps(seen: Observation) -> Finding | None:
    """Report ranks that compute the same passes but do not all step."""
    exchange = (any(map(_exchanges, rank.of(Collective))) for rank in seen.ranks)
    if not is_data_parallel(seen) and not all(exchange):
        return None
    # In a long run, ranks record different passes after the first steps.
    is_long = any(rank.made > ALL_WATCHED for rank in seen.ranks)
    finished = seen.over and not seen.ended_by_us and not is_long
    finished = finished and all(rank.reached_end and not rank.raised for rank in seen.ranks)
    passes = [[one for one in rank.of(Backward) if one.step < ALL_WATCHED] for rank in seen.ranks]
    fewest, most_passes = min(map(len, passes)), max(map(len, passes))
    if not fewest or (most_passes - fewest > (0 if finished else 1) and not is_long):
        return None
    # We read the ranks' files at different times, so compare the steps before the same pass.
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
        f"In {fewest} backward passes, rank {most.rank} takes {made[most.rank]} optimizer steps "
        f"here, but rank {listed([str(rank) for rank in fewer])} takes {less}. A rank that skips "
        "a step keeps its old parameters."
    )
    sends = len(sent) >= gap
    doubt = "unless the script sends the result to the other ranks" if sends else ""
    at = most.steps[0] if most.steps else None
    alone = fewer[0] if len(fewer) == 1 else None
    return make_finding("S08", "error", why, at, rank=alone, doubt=doubt)


# --- gradients agree, parameters do not


def _never_averaged(drift: Drift) -> Finding | None:
    """Report ranks that train on parts of one dataset, but never exchange more than a number."""
    seen, ranks = drift.seen, drift.ranks
    if not all(map(_trains_on_a_share, ranks)) or any(map(_may_exchange, ranks)):
        return None
    whole = seen.over and not seen.ended_by_us and all(rank.made <= ALL_WATCHED for rank in ranks)
    whole = whole and all(rank.reached_end and not rank.raised for rank in ranks)
    why = (
        f"Each rank trains on its own share of the data (DistributedSampler), but before step "
        f"{drift.number}, the gradients of {listed(drift.names)} differ, and no collective exchanges "
        "gradients or parameters. Every rank trains its own model."
    )
    fix = "Wrap the model in DistributedDataParallel, or all-reduce every gradient after backward and divide it by the number of ranks."
    doubt = "" if whole else "unless the ranks average their parameters later"
    evidence = drift.norms("gradients")
    return make_finding("S08", "error", why, drift.steps[0], evidence, fix=fix, doubt=doubt)


def _trains_on_a_share(rank: WatchedRank) -> bool:
    shares = {one.loader for one in rank.of(Loader) if one.replicas == rank.start.world}
    passes = [one for window in windows(rank) if window.step for one in window.micro_steps]
    return any(batch.loader in shares for one in passes for batch in one.batches)


def _may_exchange(rank: WatchedRank) -> bool:
    """Return whether a rank sends or gets more than one number after its first backward pass, or
    runs collectives that we cannot see."""
    passes = [one for one in rank.of(Backward) if one.step < ALL_WATCHED]
    calls = [one for one in rank.of(Collective) if one.t > passes[0].t]
    if rank.of(Group) or any(
        "object" in one.op or one.shape not in (None, [], [1]) for one in calls
    ):
        return True
    first, last = (one.seq[1] if one.seq else 0 for one in (passes[0], passes[-1]))
    own = rank.collectives.get(DEFAULT_GROUP, {})
    return any(number not in own for number in range(first + 1, last + 1))


def _explain_parameters(drift: Drift) -> Finding:
    evidence, step = drift.norms("parameters"), drift.steps[0]
    names = listed(drift.names)
    rates = [tuple(each.lr) for each in drift.steps]
    if len(set(rates)) > 1:
        changes = [event for event in drift.ranks[0].of(Scheduled) if event.t < step.t]
        shown = "; ".join(
            f"rank {rank.rank}: {', '.join(f'{rate:g}' for rate in lr if rate is not None)}"
            for rank, lr in zip(drift.ranks, rates, strict=True)
        )
        why = (
            f"At step {drift.number}, all ranks have the same gradients but different learning rates "
            f"({shown}), so {names} drift apart."
        )
        fix = "Use one value on all ranks: all_reduce the metric before scheduler.step(metric)."
        return make_finding("S08", "error", why, [step, *changes][-1], evidence, fix=fix)
    loads = [r for r in drift.ranks if any(e.model is not None for e in r.of(LoadState))]
    if loads and len(loads) < len(drift.ranks):
        why = (
            f"Only rank {listed([str(rank.rank) for rank in loads])} loaded a state after DDP had made "
            f"all ranks equal. {names} differ from then on."
        )
        fix = "Load before DistributedDataParallel(…), or on every rank."
        event = loads[0].of(LoadState)[0]
        return make_finding("S08", "error", why, event, evidence, culprit(drift, loads), fix=fix)
    if any(ddp_wraps(rank) for rank in drift.ranks) or drift.number > 1:
        why = (
            f"After step {drift.number}, {names} differ between ranks, although gradients and learning "
            "rates are equal. Some ranks changed them differently."
        )
        fix = "Change parameters the same way on all ranks, or before creating DDP."
        return make_finding("S08", "error", why, step, evidence, fix=fix)
    reduced = [e for e in drift.ranks[0].of(Collective) if e.op == "all_reduce" and e.t < step.t]
    why = (
        f"The ranks apply the same averaged gradients but started with different parameters ({names}), "
        "so every rank trains its own model."
    )
    return make_finding("S11", "error", why, [step, *reduced][-1], evidence)
