"""Deadlines: how long each phase of a run may take."""

from __future__ import annotations

from typing import NamedTuple

from paralab.errors import UsageError


class Deadlines(NamedTuple):
    """In seconds: from the start to the first step, one step, and the part of a save that blocks
    training."""

    start: float = 600.0
    step: float = 600.0
    save: float = 600.0

    def check(self) -> None:
        for phase, seconds in self._asdict().items():
            if not seconds > 0:
                raise UsageError(
                    f"--{phase}-deadline {seconds:g} is not a positive number of seconds.",
                    fix=f"--{phase}-deadline 60",
                )
