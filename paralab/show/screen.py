"""Show a run in the terminal: a progress bar, the live view, or a line per 10% of progress."""

from collections.abc import Callable
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paralab.plan.plan import Plan
from paralab.record.folder import RunFolder
from paralab.show.console import console, errors
from paralab.show.follow import Follower
from paralab.show.live import LiveView
from paralab.show.run import print_grid, print_ranks, print_sentence
from paralab.units import rate


class View(Protocol):
    def update(self) -> None: ...
    def stop(self) -> None: ...


class Screen:
    """Prints the plan, then opens a view once all ranks have started."""

    def __init__(self, show: tuple[str, ...], live: bool, looking: bool) -> None:
        self.show, self.live = show, live
        self.view: View | None = None
        # rich shows this only in a terminal.
        self.looking = errors.status("inspecting the machine and the workload")
        if looking:
            self.looking.start()

    def watch(self, plan: Plan, folder: RunFolder) -> Callable[[], None]:
        """Print the plan, and return the poll function. A Slurm restart calls this again."""
        self.close()
        self.view = None
        print_sentence(plan, plan.workload.rpartition("/")[2])
        self.follower = Follower(plan, folder)
        return self.poll

    def poll(self) -> None:
        started = self.follower.poll()
        for event in started if "ranks" in self.show else ():
            where = f"Device: {', '.join(event.devices)} | PID: {event.pid}"
            console.print(f"Rank: {event.rank} | Local Rank: {event.local_rank} | {where}")
        # Open the view only now, because other output would break a live view.
        if self.view is None and self.follower.all_started:
            ranks = self.follower.ranks
            pids = {rank.plan.rank: rank.started.pid for rank in ranks if rank.started}
            print_ranks(self.follower.plan, pids)
            print_grid(self.follower.plan)
            self.view = self._open()
        if self.view:
            self.view.update()

    def _open(self) -> View:
        if not errors.is_terminal or errors.is_dumb_terminal:
            return Lines(self.follower, with_ranks=self.live)
        return LiveView(self.follower, errors) if self.live else Bar(self.follower)

    def close(self) -> None:
        self.looking.stop()
        if self.view:
            self.view.stop()


def _numbers(follower: Follower) -> str:
    return f"loss {follower.losses[-1]:.4f}  {rate(follower.samples_per_second)} samples/s"


class Bar:
    """A progress bar that disappears when the run is over."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        numbers = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        bar = BarColumn(bar_width=30)
        self.progress = Progress(bar, *numbers, console=errors, transient=True)
        self.task = self.progress.add_task("", total=follower.plan.num_steps)
        self.progress.start()

    def update(self) -> None:
        if done := self.follower.done:
            numbers = _numbers(self.follower)
            self.progress.update(self.task, completed=done, description=numbers)

    def stop(self) -> None:
        self.progress.stop()


class Lines:
    """One line for each tenth of the run; with --live, each rank's load and communication."""

    def __init__(self, follower: Follower, with_ranks: bool) -> None:
        self.follower, self.with_ranks, self.tenths = follower, with_ranks, 0

    def update(self) -> None:
        done, total = self.follower.done, self.follower.plan.num_steps
        if done * 10 // total > self.tenths:
            self.tenths = done * 10 // total
            ranks = self._ranks() if self.with_ranks else ""
            errors.print(f"step {done}/{total}  {_numbers(self.follower)}{ranks}", soft_wrap=True)

    def _ranks(self) -> str:
        text = ""
        for rank in self.follower.ranks:
            moved = self.follower.communication_share(rank.plan.rank)
            known = {"load": rank.mean_load, "communication": moved}
            shares = [f"{name} {share:.0%}" for name, share in known.items() if share is not None]
            text += f"  rank {rank.plan.rank}: {', '.join(shares) or 'not measured'}"
        return text

    def stop(self) -> None:
        """Do nothing, because printed lines do not need cleanup."""
