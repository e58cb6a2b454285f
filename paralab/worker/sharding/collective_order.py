"""Make sure that all fsdp ranks gather and reduce the same units in the same order, and that all ep
ranks call the same expert layers.

A collective does not check what its data means. If rank 0 gathers expert 1 while rank 1 gathers
expert 2, each rank gets half of both experts and keeps training without an error. So each rank
tracks the order of its collectives. A step with the same order as the previous step does not need a
check. In the first step, and once its order changes, a rank compares its next collective with the
other ranks. If no rank answers, only the rank that asked has changed its order.

    step 0   checked      gather a, gather b, reduce b, reduce a      all ranks agree
    step 1   same order   no check needed
    step 2   rank 1 is about to gather c instead of b: it asks, no rank answers, and it raises
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paralab.errors import ParalabError
from paralab.plan.sharding import BRANCHES
from paralab.worker.groups import PATIENCE

ANSWER_SECONDS = 5.0  # wait for the other ranks for this time or two steps, whichever is longer
DONE = "finish the step"


class CollectiveOrder:
    def __init__(self, group: dist.ProcessGroup, rank: int, strategy: str = "fsdp") -> None:
        self.group, self.rank, self.strategy = group, rank, strategy
        self.step = -1
        self.agreed: list[str] = []
        self.actions: list[str] = []  # actions in this step
        self.asking = False
        self.began = time.monotonic()
        self.longest = 0.0

    def begin(self, step: int) -> None:
        self.step, self.actions, self.asking = step, [], not self.agreed
        self.began = time.monotonic()

    def announce(self, action: str) -> None:
        """Announce this rank's next action. Raise if another rank is about to do something else."""
        place = len(self.actions)
        expected = self.agreed[place] if place < len(self.agreed) else DONE
        self.actions.append(action)
        if not self.asking and action == expected:
            return
        try:
            self._ask(action)
        except RuntimeError:
            if self.asking:  # all ranks were asking, so one of them has exited
                raise
            raise self._error(
                f"rank {self.rank} is about to {action}, but the others are about to {expected}"
            ) from None
        self.asking = True

    def end(self) -> None:
        """End the step. If this rank was asking, check that all ranks end the step here."""
        if self.asking or self.actions != self.agreed:
            self.announce(DONE)
            self.agreed = self.actions[:-1]
        self.longest = max(self.longest, time.monotonic() - self.began)

    def _ask(self, action: str) -> None:
        words = f"{len(self.actions)} {action}".encode()[:256]
        mine = torch.zeros(256, dtype=torch.uint8)
        mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.group.size())]
        work: Any = dist.all_gather(every, mine, group=self.group, async_op=True)
        # In the first step, all ranks ask, and some may still be loading their model and data.
        patience = timedelta(seconds=max(ANSWER_SECONDS, 2 * self.longest))
        work.wait(patience if self.agreed else PATIENCE)

        if all(torch.equal(mine, other) for other in every):
            return
        texts = [bytes(other.tolist()).rstrip(b"\0").decode(errors="replace") for other in every]
        actions = [text.partition(" ")[2] for text in texts]
        other = next(rank for rank, each in enumerate(actions) if each != actions[0])
        ranks = dist.get_process_group_ranks(self.group)
        theirs = f"rank {ranks[other]} is about to {actions[other]}"
        raise self._error(f"rank {ranks[0]} is about to {actions[0]}, but {theirs}")

    def _error(self, what: str) -> ParalabError:
        return ParalabError(
            f"{self.strategy}: {BRANCHES} in step {self.step}: {what}. Continuing would mix up their shards.",
            fix="call the same submodules on every rank, or use ddp --find-unused, which allows "
            "ranks to differ",
        )
