"""A trial run: after so many optimiser steps every rank waits to be ended."""

from __future__ import annotations

import time

from paralab.observe.rank import Rank


def hold(rank: Rank, made: int) -> None:
    """Before one step too many: wait here. What ends the ranks is the watcher, when all of them wait, or have ended."""
    if rank.trial_steps is None or made < rank.trial_steps:
        return
    rank.open("held", {})
    while True:
        time.sleep(0.2)
