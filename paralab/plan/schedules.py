"""Pipeline schedules: in which order every rank runs its parts of the model, and how long it idles.
Pure functions on numbers.

A rank holds one part (gpipe, 1f1b) or two (interleaved, zero-bubble); part p lives on rank p mod
stages. What the ranks do, for 2 stages and 4 micro-batches, where F is a forward pass, B a backward
pass, and ·· the bubble:

    gpipe         rank 0   F0 F1 F2 F3 ·· ·· B0 B1 B2 B3      all activations are kept until the turn
                  rank 1   ·· F0 F1 F2 F3 B0 B1 B2 B3 ··
    1f1b          rank 0   F0 F1 ·· B0 F2 B1 F3 B2 ·· B3      the same bubble, at most `stages` activations are kept
                  rank 1   ·· F0 B0 F1 B1 F2 B2 F3 B3 ··
    interleaved   like 1f1b, in pieces of half the length: half the bubble
    zero-bubble   a backward pass is cut in two, I (gradient of the input, which the rank before waits for) and W (of the
                  weights, for which nobody waits): W fills what would be bubble

torch.distributed.pipelining makes the same lists (tests/plan/test_schedules.py holds them against
each other).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

PARTS_PER_RANK: Mapping[str, int] = MappingProxyType(
    {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}
)
SCHEDULES = tuple(PARTS_PER_RANK)
WITHOUT = "leave --schedule out"  # the fix for a model that cannot be cut into processes
UNCUT = f"cut elsewhere, or {WITHOUT}"  # the same where the cause is the place of the cuts, whatever the schedule and the batch


class Action(NamedTuple):
    """`kind` F: forward, B: backward, I: backward to the input only, W: backward to the weights
    only."""

    part: int
    kind: str
    micro: int


class Slot(NamedTuple):
    """An action with its place in time."""

    rank: int
    action: Action
    start: float
    end: float


def order(schedule: str, stages: int, micro_batches: int) -> list[list[Action]]:
    """What every rank of a pipeline does, in its order."""
    if schedule == "gpipe":
        return [
            [Action(rank, kind, micro) for kind in "FB" for micro in range(micro_batches)]
            for rank in range(stages)
        ]
    if schedule == "1f1b":
        return [
            _one_by_one(rank, 1, micro_batches, stages, micro_batches, stages - 1 - rank)
            for rank in range(stages)
        ]
    chunks, split = PARTS_PER_RANK[schedule], schedule == "zero-bubble"
    per_round = micro_batches // rounds(stages, micro_batches)
    found = []
    for rank in range(stages):
        ahead = (chunks - 1) * per_round + (1 if split else 2) * (stages - 1 - rank)
        found.append(
            _one_by_one(
                rank, chunks, micro_batches, stages, per_round, ahead, rank if split else None
            )
        )
    return found


def _one_by_one(
    rank: int,
    chunks: int,
    micro_batches: int,
    stages: int,
    per_round: int,
    ahead: int,
    weights_later: int | None = None,
) -> list[Action]:
    """`ahead` forward passes, then one forward and one backward in turn, then the backward passes
    that are left.

    A rank with several parts changes to the next one after `per_round` micro-batches.
    weights_later: a weight pass comes after every backward pass, but so many passes behind it;
    None: backward passes are whole."""
    places = [
        (n // per_round % chunks, n // (per_round * chunks) * per_round + n % per_round)
        for n in range(chunks * micro_batches)
    ]
    whole = weights_later is None
    forward = [Action(chunk * stages + rank, "F", micro) for chunk, micro in places]
    backward = [
        Action((chunks - 1 - chunk) * stages + rank, "B" if whole else "I", micro)
        for chunk, micro in places
    ]
    ahead = min(ahead, len(forward))
    found = forward[:ahead]
    weights: list[Action] = []
    for number, action in enumerate(backward):
        found += forward[ahead + number : ahead + number + 1]
        found.append(action)
        weights.append(action._replace(kind="W"))
        if weights_later is not None and number >= weights_later:
            found.append(weights.pop(0))
    return found if whole else found + weights


def rounds(stages: int, micro_batches: int) -> int:
    """The schedules with several parts per rank work in rounds of about `stages` micro-batches, all
    of the same size."""
    return max(1, micro_batches // stages)


def misfit(schedule: str, stages: int, micro_batches: int) -> str | None:
    """Why this schedule cannot run so many micro-batches; None if it can."""
    if schedule != "gpipe" and micro_batches < stages:
        return f"{schedule} keeps every stage busy with a micro-batch of its own: {micro_batches} < {stages} stages"
    if PARTS_PER_RANK[schedule] > 1 and micro_batches % (turns := rounds(stages, micro_batches)):
        return f"{schedule} works in {turns} equal rounds (micro-batches ÷ stages): {micro_batches} is no multiple of {turns}"
    return None


def ideal_bubble(stages: int, micro_batches: int, schedule: str = "gpipe") -> float:
    """The idle share of the ranks, if all passes of a kind are equally long and sending takes no
    time (s stages, m micro-batches, v parts per rank):

        gpipe, 1f1b    (s - 1) / (m + s - 1)          2 stages, 4 micro-batches -> 2 of 10 slots = 1/5
        interleaved    (s - 1) / (v·m + s - 1)        the same idle slots, half as long: 1/9
        zero-bubble    (s - 1) / (3·v·m + s - 1)      forward, input and weight pass equally long: 1/25

    A rank works v·m times a forward, an input and a weight pass. The last stage waits s - 1 forward
    passes for its first input, and nobody can fill that. The first stage waits s - 1 backward
    passes for its last gradient: with whole backward passes that is bubble too (so both terms have
    the length of forward + backward), with separate ones weight passes are left to fill it.
    """
    passes = PARTS_PER_RANK[schedule] * micro_batches * (3 if schedule == "zero-bubble" else 1)
    return (stages - 1) / (passes + stages - 1)


def simulate(orders: list[list[Action]], full_backward: float = 1.0) -> list[Slot]:
    """When everything would happen if every pass took one slot (a full backward pass
    `full_backward`) and sending took none."""
    parts = 1 + max(action.part for actions in orders for action in actions)
    seconds = {"F": 1.0, "B": full_backward, "I": 1.0, "W": 1.0}
    done: dict[
        tuple[str, int, int], float
    ] = {}  # F, I (or B) and W of a part and micro-batch: when it ended
    free = [0.0] * len(orders)
    waiting = [list(actions) for actions in orders]
    found = []
    while any(waiting):
        moved = False
        for rank, actions in enumerate(waiting):
            while actions:
                part, kind, micro = actions[0]
                needed = [("F", part - 1, micro)] if kind == "F" and part else []
                if kind in "BI":
                    needed = [("F", part, micro)] + (
                        [("I", part + 1, micro)] if part + 1 < parts else []
                    )
                elif kind == "W":
                    needed = [("I", part, micro)]
                if any(key not in done for key in needed):
                    break
                start = max([free[rank], *(done[key] for key in needed)])
                free[rank] = start + seconds[kind]
                done["I" if kind == "B" else kind, part, micro] = free[rank]
                found.append(Slot(rank, actions.pop(0), start, free[rank]))
                moved = True
        assert moved, "these orders wait for one another"
    return found


def idle_share(slots: list[Slot]) -> float:
    """The bubble: idle share of all ranks between the first start and the last end."""
    ranks = 1 + max(slot.rank for slot in slots)
    window = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    return 1 - sum(slot.end - slot.start for slot in slots) / (ranks * window)
