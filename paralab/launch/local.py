"""The launcher for one machine: it starts the ranks itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from paralab.launch.job import Job, Outcome
from paralab.launch.restart import Attempts
from paralab.plan.grid import Place


@dataclass(frozen=True)
class LocalLauncher:
    """`places` are the ranks' places, if another launcher already chose them."""

    places: Sequence[Place] = ()

    def run(self, job: Job) -> Outcome:
        return Attempts(job, self.places).train()
