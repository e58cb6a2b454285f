"""The launcher for one machine. It starts the ranks, and restarts them after a failure: from the
last checkpoint, at most `--max-restarts` times, and only if that can help."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paralab.errors import NothingLeft
from paralab.launch.job import Job, Outcome, conclude
from paralab.launch.ranks import RankExits, run_ranks
from paralab.launch.resume import choose_checkpoint, lock_checkpoints
from paralab.launch.stop import StopRequest, stop_in_order
from paralab.machine.signals import number_of
from paralab.plan.grid import Place
from paralab.record.events import Step
from paralab.record.reader import read_events
from paralab.record.status_board import StatusBoard
from paralab.units import plural


@dataclass(frozen=True)
class FailedAttempt:
    """How far an attempt got before it failed."""

    resumed_from: int  # the number of steps in the checkpoint that it started from
    saved: int  # the number of steps in the newest good checkpoint when it failed
    last_step: int  # its last finished step, or -1 if none


def is_stuck(attempts: Sequence[FailedAttempt]) -> bool:
    """Return whether another attempt would only repeat the failure.

    resumed from   saved   last step
         4           4         7
         4           4         7       stuck: it failed at the same step without a new checkpoint
         4           8         7       not stuck: it saved a new checkpoint
         4           4         5       not stuck: it failed at another step
    """
    if len(attempts) < 2:
        return False
    before, last = attempts[-2:]
    return last.saved <= last.resumed_from and last.last_step == before.last_step


class Attempts:
    """All attempts at one run."""

    together_seconds = 0.0  # treat signals within this time as one

    def __init__(self, job: Job, places: Sequence[Place]) -> None:
        self.job = job
        self.training = job.prepare(job, places)
        self.show_progress = job.watch(self.training.plan, self.training.folder)
        self.origin_seconds = time.perf_counter()
        self.failed: list[FailedAttempt] = []

    def run_ranks(self, attempt: int, stop: StopRequest) -> RankExits:
        """Run the ranks on this machine. A launcher for multiple machines overrides this."""

        def on_poll(board: StatusBoard) -> None:
            self.show_progress()
            if stop:
                stop.announce()
                board.agree()

        specs = [self.training.to_spec(attempt=attempt)]
        deadlines = self.job.options.deadlines
        return run_ranks(self.training.folder, specs, self.origin_seconds, on_poll, deadlines)

    def train(self) -> Outcome:
        """Train. After a failure, restart if this is allowed and can help."""
        try:
            with lock_checkpoints(self.job.options.checkpoint):
                outcome = self._train()
        except KeyboardInterrupt as error:
            folder, number = self.training.folder, number_of(error)
            outcome = Outcome(folder, "interrupted", self.training, signal=number)
        return replace(outcome, wall_seconds=time.perf_counter() - self.origin_seconds)

    def _train(self) -> Outcome:
        self._choose_checkpoint(self.job.options.resume)
        policy, steps = self.training.checkpoints, self.training.plan.num_steps
        if policy and policy.done == steps:
            text = f"{policy.resume} already contains all {plural(steps, 'step')}"
            raise NothingLeft(text, fix="more --steps")

        last = self.job.options.max_restarts
        with stop_in_order(policy is not None, self.job.say, self.together_seconds) as stop:
            for attempt in range(last + 1):
                outcome = conclude(self.training, self.run_ranks(attempt, stop), attempt)
                if outcome.status != "failed":
                    return outcome
                assert outcome.exits is not None
                problem = self.job.explain(outcome)
                self.training.folder.note_failure(attempt, problem, outcome.exits.noticed)
                if attempt == last or stop:
                    return outcome

                self.job.say(problem)
                self._rewind(attempt)
                if self.training.steps_done == steps:  # it failed after it saved the last step
                    complete = all(Path(path).exists() for path in self.training.extras.values())
                    return replace(outcome, status="completed") if complete else outcome
                if is_stuck(self.failed):
                    return replace(outcome, stuck_after=self.failed[-1].last_step)
                if stop:
                    return outcome
                done = self.training.steps_done
                begin = f"step {done}" if done else "the beginning"
                self.job.say(f"Restarting from {begin} (restart {attempt + 1} of {last}).")
        raise AssertionError("the last attempt always returns")

    def _rewind(self, attempt: int) -> None:
        """Go back to the newest good checkpoint, and record how far the attempt got."""
        resumed_from = self.training.steps_done
        self._choose_checkpoint(resume=True)
        events = read_events(self.training.folder.path, attempt).values()
        steps = [each.step for rank in events for each in rank if isinstance(each, Step)]
        last_step = max(steps, default=-1)
        self.failed.append(FailedAttempt(resumed_from, self.training.steps_done, last_step))

    def _choose_checkpoint(self, resume: bool) -> None:
        options = replace(self.job.options, resume=resume)
        policy = choose_checkpoint(options, self.training.plan, self.job.say)
        self.training = replace(self.training, checkpoints=policy)


@dataclass(frozen=True)
class LocalLauncher:
    """Runs the ranks on this machine. `places` are the ranks' places, if another launcher chose
    them."""

    places: Sequence[Place] = ()

    def run(self, job: Job) -> Outcome:
        return Attempts(job, self.places).train()
