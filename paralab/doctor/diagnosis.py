"""`paralab doctor`: what was given decides who looks at it; what they find becomes one diagnosis.

A Python file is read, a run folder and logs are read, a command is watched, a process is asked
where it stands; with nothing given, this machine is looked at. Nothing here imports torch, and each
part is imported only where it looks: reading a script is quick.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paralab.doctor.catalog import ENTRIES, apply, checked_ids, checks
from paralab.doctor.finding import Finding, ordered
from paralab.doctor.ignoring import Silence
from paralab.doctor.registry import Source
from paralab.doctor.report import Diagnosis
from paralab.doctor.sources import Sources
from paralab.errors import UsageError
from paralab.units import plural

Say = Callable[[Finding], None]


@dataclass(frozen=True)
class Given:
    """The paths of a command line, by what they are."""

    scripts: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)


def sort_out(paths: Sequence[Path]) -> Given:
    """A folder that is no run is one of logs; - is a log on standard input."""
    given = Given()
    for path in {os.path.realpath(path): path for path in paths}.values():
        if not path.exists() and str(path) != "-":
            raise UsageError(
                f"{path} does not exist.",
                fix="a script, logs, or a run folder; a command goes after --",
            )
        is_run = path.is_dir() and (path / "manifest.json").exists()
        kind = (
            given.runs
            if is_run
            else given.scripts
            if path.suffix == ".py" and path.is_file()
            else given.logs
        )
        kind.append(path)
    return given


class Case:
    """What is known so far about one subject: every finding passes through `heard`, which knows the
    comments that silence."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.silence = Silence(self.sources)
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def add(self, findings: Sequence[Finding]) -> None:
        self.findings += [finding for finding in findings if self.silence.heard(finding)]

    def closed(
        self, subject: str, ways: Sequence[Source], looked_at: str, not_looked_at: str, **more: Any
    ) -> Diagnosis:
        return Diagnosis(
            subject,
            tuple(ways),
            tuple(ordered(list(dict.fromkeys(self.findings)))),
            looked_at,
            not_looked_at,
            ignored=tuple(dict.fromkeys(self.silence.ignored)),
            notes=tuple(dict.fromkeys(self.notes)),
            sources=self.sources,
            **more,
        )


def look_at(paths: Sequence[Path]) -> Diagnosis:
    """Scripts, run folders and logs; also several kinds at once."""
    given = sort_out(paths)
    case = Case()
    ways: list[Source] = []
    looked_at, not_looked_at = [], []
    if given.scripts:
        ways.append("script")
        _read_scripts(case, given.scripts)
        looked_at.append(f"{plural(len(given.scripts), 'script')}, {_rules_of('script')}")
        not_looked_at.append(_not_in_scripts(given.scripts))
    if given.runs:
        ways.append("run")
        _read_runs(case, given.runs)
        looked_at.append(f"{plural(len(given.runs), 'recorded run')}, {_rules_of('run')}")
        not_looked_at.append("the script that was run: `paralab doctor SCRIPT.py` reads it")
    if given.logs:
        ways.append("log")
        _read_logs(case, given.logs)
        looked_at.append(f"{plural(len(given.logs), 'log')}, {_rules_of('log')}")
        not_looked_at.append("what was not printed: silent mistakes leave nothing in a log")
    subject = (
        ", ".join(map(str, paths)) if len(paths) < 4 else f"{paths[0]} and {len(paths) - 1} more"
    )
    return case.closed(subject, ways, "; ".join(looked_at), "; ".join(not_looked_at))


def _read_scripts(case: Case, scripts: Sequence[Path]) -> None:
    from paralab.doctor.script import reading

    for path in scripts:
        case.sources.text(str(path))  # what is judged is what is shown and patched
        case.add(apply("script", reading.read_script(path)))
    looked_for = checked_ids("script")
    case.notes += case.silence.notes(map(str, scripts), looked_for)


def _read_runs(case: Case, folders: Sequence[Path]) -> None:
    from paralab.doctor.recorded import Recorded

    for folder in folders:
        case.add(apply("run", Recorded.read(folder)))


def _read_logs(case: Case, logs: Sequence[Path]) -> None:
    from paralab.doctor.logs import reading

    case.add(apply("log", reading.read_logs(logs)))


def _not_in_scripts(scripts: Sequence[Path]) -> str:
    beyond = len(ENTRIES.keys() - checked_ids("script"))
    script = scripts[0] if len(scripts) == 1 else "SCRIPT.py"
    return (
        f"the {beyond} entries that no rule reads from a script; "
        f"`paralab doctor --try 3 -- torchrun --nproc_per_node=2 {script}` sees what its ranks do"
    )


def observe(
    command: Sequence[str],
    *,
    steps: int | None,
    stall_seconds: float | None,
    folder: Path | None,
    say: Say,
) -> Diagnosis:
    """Start the command as it is, watch its ranks, and tell on the way what is found."""
    from paralab.doctor import observing

    case = Case()

    def heard(finding: Finding) -> None:
        if case.silence.heard(finding):
            say(finding)

    with (
        nullcontext(folder)
        if folder
        else TemporaryDirectory(prefix="paralab-doctor-", ignore_cleanup_errors=True) as place
    ):
        observed = observing.observe(
            command, folder=Path(place), steps=steps, stall_seconds=stall_seconds, say=heard
        )
    case.add(observed.findings)
    case.notes += observed.notes
    code = observed.exit_code
    many = f" {plural(steps, 'step')}" if steps else ""
    cost = (
        ""
        if observed.cost is None
        else f" (being watched took {observed.cost:.1%} of their time, as they measured it)"
    )
    if code and not case.findings:
        case.notes.append(f"The command ended with exit code {code}, and no rule explains why.")
    return case.closed(
        shlex.join(command),
        ("ranks",),
        f"its ranks while they trained{many}{cost}, {_rules_of('ranks')}",
        "the script itself, and what these ranks and steps did not come to: `paralab doctor SCRIPT.py` reads all branches",
        command_exit_code=code,
    )


def attach(pid: int) -> Diagnosis:
    """A job that stands still now."""
    from paralab.doctor import attaching

    case = Case()
    attached = attaching.attach(pid)
    case.add(attached.findings)
    case.notes.extend(attached.notes)
    return case.closed(
        f"process {pid}",
        ("ranks",),
        "the stacks of its ranks, and the collectives where they were recorded",
        "anything but this moment: what led here shows `paralab doctor -- COMMAND`",
    )


def preflight() -> Diagnosis:
    """This machine, and what of it was given to us."""
    from paralab.doctor import preflight

    case = Case()
    facts = preflight.look()
    case.add(apply("machine", facts))
    return case.closed(
        "this machine",
        ("machine",),
        f"devices, backends, ports, memory, cores and links, {_rules_of('machine')}",
        "any training: give a script, a command after --, a run folder or logs",
        facts=tuple(preflight.table(facts, case.findings)),
    )


def _rules_of(way: Source) -> str:
    known = checks(way)
    return f"{plural(len(known), 'check')} for {len(checked_ids(way))} entries of the catalog"
