"""The runs that verify a configuration, each compared with a single-device reference that several
may share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from paralab.analyse.verify import Verification, failed_verification, judge, with_excuse
from paralab.errors import RunFailed
from paralab.experiment.planning import probe_once, record_plan
from paralab.launch.job import Training
from paralab.machine.host import Machine, threads_asked
from paralab.plan.plan import Plan
from paralab.plan.request import Request, on_one_device
from paralab.plan.resolve import resolve
from paralab.record.events import Verify
from paralab.record.folder import RunFolder
from paralab.record.reader import read_events
from paralab.workload.summary import Summary


@dataclass(frozen=True)
class Proof:
    """`job` decides; `asked` trains as requested, if that differs for a known reason. `plan`
    belongs to the request."""

    plan: Plan
    job: int
    asked: int | None
    split_problem: str | None

    @property
    def jobs(self) -> list[int]:
        return [self.job] if self.asked is None else [self.job, self.asked]


class ReferenceRuns:
    """`jobs` must be trained in order: a reference comes before the first job that needs it."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder, self.private = folder, private
        self.jobs: list[Training] = []
        self.references: dict[tuple[Request, tuple[str, ...]], str] = {}

    def add(self, name: str, request: Request, machine: Machine, summary: Summary) -> Proof:
        """Compare this configuration with the same training on one device.

        If the two may differ for a known reason (`Plan.differences`), the proof runs in fp64 with
        those reasons removed (`paralab.workload.proof_controls`), and a second pair of runs, as
        requested, measures the difference they make.
        """
        summary = replace(
            summary, dropout=False
        )  # switched off on both sides: a mistake could hide behind it
        still = replace(summary, random=False, state=(), batch_norms=0)
        exact = replace(request, precision="fp64", loss_scale=None, no_scaler=None)
        plan = self._plan(request, machine, summary)
        if not plan.differences:
            return Proof(
                plan, self._pair(name, request, machine, summary, ()), None, summary.split_problem
            )
        proof = self._pair(name, exact, machine, still, summary.controls)
        return Proof(
            plan,
            proof,
            self._pair(f"{name}-as-asked", request, machine, summary, ()),
            summary.split_problem,
        )

    def _pair(
        self,
        name: str,
        request: Request,
        machine: Machine,
        summary: Summary,
        control: tuple[str, ...],
    ) -> int:
        """Add the job that trains this request, after its reference; return its number."""
        plan = self._plan(request, machine, summary, control)
        single = replace(on_one_device(request, plan.batch_size), loss_scale=plan.loss_scale)
        key = single, control
        if key not in self.references:
            self.references[key] = str(self.private / f"reference{len(self.references)}.pt")
            extras = {"save_reference": self.references[key]}
            reference = self._plan(single, machine, summary, control)
            self._append(f"reference{len(self.references)}", reference, extras, machine, summary)
        return self._append(name, plan, {"compare_with": self.references[key]}, machine, summary)

    def _plan(
        self, request: Request, machine: Machine, summary: Summary, control: tuple[str, ...] = ()
    ) -> Plan:
        return replace(
            resolve(request, machine, summary, probe_once, threads_asked()), control=control
        )

    def _append(
        self, name: str, plan: Plan, extras: dict[str, str], machine: Machine, summary: Summary
    ) -> int:
        job = Training(plan, RunFolder.create(self.folder / name, ""), extras)
        record_plan(job.folder, plan, machine, summary)
        self.jobs.append(job)
        return len(self.jobs) - 1

    def is_reference(self, number: int) -> bool:
        return "save_reference" in self.jobs[number].extras

    def verdict(self, proof: Proof, failed: dict[int, RunFailed]) -> Verification:
        proved = self._judge(proof.job, failed, proof.split_problem)
        proved = replace_fields(proved, control=self.jobs[proof.job].plan.control)
        asked = None if proof.asked is None else self._judge(proof.asked, failed)
        return with_excuse(proved, proof.plan, asked)

    def _judge(
        self, number: int, failed: dict[int, RunFailed], split_problem: str | None = None
    ) -> Verification:
        precision, folder = self.jobs[number].plan.precision, self.jobs[number].folder.path
        if number in failed:
            return failed_verification(precision, failed[number].problem)
        ranks = read_events(folder).values()
        events = [event for rank in ranks for event in rank if isinstance(event, Verify)]
        return judge(precision, events, split_problem)
