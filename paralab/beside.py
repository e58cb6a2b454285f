"""Trainings beside a single device's: the jobs that prove a set-up, each compared with a reference that several may share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paralab.analyse.parity import failed_case, judge
from paralab.errors import RunFailed
from paralab.jobs import Job
from paralab.machine.host import Machine, threads_asked
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.record.folder import RunFolder
from paralab.record.reader import read_events
from paralab.training import probe_once, record_plan
from paralab.workload.summary import Summary


class Beside:
    """`jobs` are to be trained in their order: a reference comes before the first one that needs it."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder, self.private = folder, private
        self.jobs: list[Job] = []
        self.references: dict[Request, str] = {}

    def add(self, name: str, plan: Plan, single: Request, machine: Machine, summary: Summary) -> int:
        """Prove this plan against the same training on one device; returns the number of its job."""
        if single not in self.references:
            self.references[single] = str(self.private / f"reference{len(self.references)}.pt")
            reference = resolve(single, machine, summary, probe_once, threads_asked())
            extras = {"save_reference": self.references[single]}
            self._append(f"reference{len(self.references)}", reference, extras, machine, summary)
        return self._append(name, plan, {"compare_with": self.references[single]}, machine, summary)

    def _append(self, name: str, plan: Plan, extras: dict[str, str], machine: Machine, summary: Summary) -> int:
        job = Job(plan, RunFolder.create(self.folder / name, ""), extras)
        record_plan(job.folder, plan, machine, summary)
        self.jobs.append(job)
        return len(self.jobs) - 1

    def is_reference(self, number: int) -> bool:
        return "save_reference" in self.jobs[number].extras

    def verdict(self, number: int, failed: dict[int, RunFailed]) -> dict[str, Any]:
        plan, folder = self.jobs[number].plan.to_json(), self.jobs[number].folder.path
        if number in failed:
            return failed_case(plan, failed[number].problem)
        found = [event for events in read_events(folder).values() for event in events if event["event"] == "parity"]
        return judge(plan, found)
