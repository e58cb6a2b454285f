"""The launcher for one machine: it starts the ranks itself."""

from collections.abc import Sequence

from paralab.launch.job import Job, Outcome
from paralab.launch.ranks import RankExits, run_ranks
from paralab.launch.restart import Attempts
from paralab.launch.stop_signals import StopRequest
from paralab.plan.grid import Place
from paralab.record.status_board import StatusBoard


class LocalLauncher:
    """Starts the ranks on this machine. `places` are the ranks' places, if another launcher already
    chose them."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self.places = places

    def run(self, job: Job) -> Outcome:
        return LocalAttempts(job, self.places).train()


class LocalAttempts(Attempts):
    def run_ranks(self, attempt: int, stop: StopRequest) -> RankExits:
        def on_poll(board: StatusBoard) -> None:
            self.show_progress()
            if stop:
                stop.announce()
                board.agree()

        specs = [self.training.to_spec(attempt=attempt)]
        deadlines = self.job.options.deadlines
        return run_ranks(self.training.folder, specs, self.origin_seconds, on_poll, deadlines)
