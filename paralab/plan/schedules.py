"""Pipeline schedules: the order in which each rank runs its model parts, and the bubble. These are
pure functions on plain numbers.

A rank has one model part (gpipe, 1f1b) or two (interleaved, zero-bubble). Part p is on rank p mod
stages. This is the order for 2 stages and 4 micro-batches, where F is a forward pass, B is a
backward pass, and ·· is the bubble:

    gpipe         rank 0   F0 F1 F2 F3 ·· ·· B0 B1 B2 B3    keeps the activations of all
                  rank 1   ·· F0 F1 F2 F3 B0 B1 B2 B3 ··    micro-batches until the first backward
    1f1b          rank 0   F0 F1 ·· B0 F2 B1 F3 B2 ·· B3    the same bubble, but stores at most
                  rank 1   ·· F0 B0 F1 B1 F2 B2 F3 B3 ··    `stages` activations
    interleaved   like 1f1b with parts of half the length: half the bubble
    zero-bubble   splits a backward pass into I (input gradients, which the previous rank waits for)
                  and W (weight gradients, which no rank waits for); W fills the bubble

torch.distributed.pipelining runs passes in the same order, which tests/plan/test_schedule_order.py
checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PARTS_PER_RANK: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}
ONE_SLOT_EACH: Mapping[str, float] = {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}
SCHEDULES = tuple(PARTS_PER_RANK)
WITHOUT = "leave out --schedule (and --shards or --zero)"  # the fix for a model that cannot be cut into processes
UNCUT = f"cut elsewhere, or {WITHOUT}"  # the fix if only these cuts are the problem


class Action(NamedTuple):
    """One pass. `kind` is F (forward), B (backward), I (backward for the inputs only), or W
    (backward for the weights only)."""

    part: int
    kind: str
    micro: int


class Slot(NamedTuple):
    """An action and when it runs."""

    rank: int
    action: Action
    start: float
    end: float


def order(schedule: str, stages: int, micro_batches: int) -> list[list[Action]]:
    """Return each pipeline rank's actions, in order.

    A rank runs some forward passes ahead, then alternates forward and backward passes, then runs
    the remaining backward passes. With multiple parts, it switches to its next part after each round
    of micro-batches. In zero-bubble, rank r runs a weight pass r backward passes late.
    """
    chunks, split = PARTS_PER_RANK[schedule], schedule == "zero-bubble"
    per_round = micro_batches // rounds(stages, micro_batches)
    places = [
        (n // per_round % chunks, n // (per_round * chunks) * per_round + n % per_round)
        for n in range(chunks * micro_batches)
    ]

    orders = []
    for rank in range(stages):
        later_ranks = stages - 1 - rank
        ahead = (chunks - 1) * per_round + (2 if schedule == "interleaved" else 1) * later_ranks
        ahead = len(places) if schedule == "gpipe" else min(ahead, len(places))
        forward = [Action(chunk * stages + rank, "F", micro) for chunk, micro in places]
        actions = forward[:ahead]
        weights: list[Action] = []
        for number, (chunk, micro) in enumerate(places):
            part = (chunks - 1 - chunk) * stages + rank
            actions += forward[ahead + number : ahead + number + 1]
            actions.append(Action(part, "I" if split else "B", micro))
            weights += [Action(part, "W", micro)] if split else []
            if weights and number >= rank:
                actions.append(weights.pop(0))
        orders.append(actions + weights)
    return orders


def rounds(stages: int, micro_batches: int) -> int:
    """Return the number of rounds in a schedule with multiple parts per rank. Each round has about
    `stages` micro-batches."""
    return max(1, micro_batches // stages)


def misfit(schedule: str, stages: int, micro_batches: int) -> str | None:
    """Return why this schedule cannot run this number of micro-batches, or None if it can."""
    if schedule != "gpipe" and micro_batches < stages:
        return (
            f"{schedule} needs at least one micro-batch per stage: "
            f"{micro_batches} < {stages} stages"
        )
    if PARTS_PER_RANK[schedule] > 1 and micro_batches % (turns := rounds(stages, micro_batches)):
        return (
            f"{schedule} runs {turns} equal rounds (micro-batches ÷ stages), "
            f"but {micro_batches} is not a multiple of {turns}"
        )
    return None


def ideal_bubble(stages: int, micro_batches: int, schedule: str = "gpipe") -> float:
    """Return the ideal bubble, which assumes that all passes of a kind take the same time and that
    sending takes none.

    With s stages, m micro-batches, and v parts per rank (the examples have s = 2 and m = 4):

        gpipe, 1f1b    (s - 1) / (m + s - 1)        2 of 10 slots are idle: 1/5
        interleaved    (s - 1) / (v·m + s - 1)      as many idle slots, half as long: 1/9
        zero-bubble    (s - 1) / (3·v·m + s - 1)    forward, input, weight passes are equal: 1/25

    A rank runs v·m forward, input, and weight passes. The last stage waits s - 1 forward passes for
    its first input, and nothing can fill that wait. The first stage waits s - 1 backward passes for
    its last gradient. If backward passes are not split, that wait is part of the bubble too, so one
    unit in the formula is a forward pass plus a backward pass. If they are split, weight passes
    fill that wait.
    """
    passes = PARTS_PER_RANK[schedule] * micro_batches * (3 if schedule == "zero-bubble" else 1)
    return (stages - 1) / (passes + stages - 1)


def simulate(
    orders: list[list[Action]], seconds: Mapping[str, float] = ONE_SLOT_EACH
) -> list[Slot]:
    """Compute when each action runs. `seconds` has the duration of each kind of pass, and sending
    takes no time."""
    parts = 1 + max(action.part for actions in orders for action in actions)
    done: dict[tuple[str, int, int], float] = {}  # (F, I or B, W; part; micro-batch) -> its end
    free = [0.0] * len(orders)
    waiting = [list(actions) for actions in orders]
    slots = []
    while any(waiting):
        moved = False
        for rank, actions in enumerate(waiting):
            while actions:
                part, kind, micro = actions[0]
                needed = {
                    "F": [("F", part - 1, micro)] if part else [],
                    "W": [("I", part, micro)],
                }.get(kind, [("F", part, micro), ("I", part + 1, micro)][: parts - part])
                if any(key not in done for key in needed):
                    break
                start = max([free[rank], *(done[key] for key in needed)])
                free[rank] = start + seconds[kind]
                done["I" if kind == "B" else kind, part, micro] = free[rank]
                slots.append(Slot(rank, actions.pop(0), start, free[rank]))
                moved = True
        assert moved, "these orders cause a deadlock"
    return slots
