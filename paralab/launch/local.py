"""The launcher for one machine: it starts the ranks itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from paralab.launch.job import Job, Outcome
from paralab.launch.restart import Attempts
from paralab.launch.resume import lock_checkpoints
from paralab.machine.signals import number_of
from paralab.plan.grid import Place


class LocalLauncher:
    """Starts ranks here; `places` are the ranks' places if another launcher already chose them."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self.places = places

    def run(self, job: Job) -> Outcome:
        training = job.prepare(job, self.places)
        attempts = Attempts(job, training)
        try:
            with lock_checkpoints(job.options.checkpoint):
                outcome = attempts.train()
        except KeyboardInterrupt as error:
            signal = number_of(error)
            outcome = Outcome(training.folder, "interrupted", training, signal=signal)
        return replace(outcome, wall_seconds=time.perf_counter() - attempts.origin_seconds)
