"""`paralab doctor` runs the checks that fit its subject and combines their findings into one
diagnosis. It reads scripts, run folders, and logs, watches a command, or inspects a process.
Without a subject, it checks this machine. Nothing here imports torch, and functions import the
other modules only when they need them, so checking a script starts quickly.
"""

import os
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paralab.doctor.baseline import Baseline, write_baseline
from paralab.doctor.catalog import ENTRIES, apply, checked_ids
from paralab.doctor.project_files import find_files, python_files
from paralab.doctor.registry import Failure, Finding, Source, ordered
from paralab.doctor.report import Diagnosis
from paralab.doctor.scripts import check_project, check_scripts, merge
from paralab.doctor.settings import Settings
from paralab.doctor.sources import Sources
from paralab.doctor.suppressions import Comments, Ignored
from paralab.errors import UsageError
from paralab.units import plural

Say = Callable[[Finding], None]


@dataclass(frozen=True)
class PathsByKind:
    """The paths on the command line, by kind."""

    scripts: list[Path] = field(default_factory=list)
    projects: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)


def sort_paths(paths: Sequence[Path]) -> PathsByKind:
    """Sort paths by kind. A folder contains a run (manifest), a project (Python files), or logs."""
    given = PathsByKind()
    for path in {os.path.realpath(path): path for path in paths}.values():
        if not path.exists() and str(path) != "-":
            raise UsageError(
                f"{path} does not exist.",
                fix="a script, a folder, logs, or a run folder; a command goes after --",
            )
        if path.suffix == ".ipynb":
            raise UsageError(
                f"{path} is a notebook, which the doctor cannot read.",
                fix=f"jupyter nbconvert --to script {path}",
            )
        if path.is_dir() and (path / "manifest.json").exists():
            given.runs.append(path)
        elif path.is_dir() and python_files(path):
            given.projects.append(path)
        elif path.suffix == ".py" and path.is_file():
            given.scripts.append(path)
        else:
            given.logs.append(path)
    return given


class Case:
    """Collects findings about one subject and sets aside those that the user silenced."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.sources = Sources()
        self.comments = Comments(self.sources)
        self.baseline = Baseline(self.settings, self.sources)
        self.findings: list[Finding] = []
        self.ignored: list[Ignored] = []
        self.hidden: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.notes: list[str] = []

    def add(self, findings: Sequence[Finding], off: Collection[str] = ()) -> None:
        """Add findings. Findings with an id in `off` are only counted."""
        for finding in dict.fromkeys(findings):
            ignored = self.ignore(finding)
            if ignored:
                self.ignored.append(ignored)
            elif finding.id in off:
                self.hidden[finding.id] += 1
            elif self.baseline.accepts(finding):
                self.ignored.append(Ignored(finding, "baseline", "in the baseline"))
            else:
                self.findings.append(finding)

    def ignore(self, finding: Finding) -> Ignored | None:
        """Return what silences a finding: a comment, or a pattern in per-file-ignores."""
        comment = self.comments.silencing(finding)
        if comment:
            return Ignored(finding, "comment", comment.reason)
        pattern = self.settings.pattern_for(finding.id, finding.file) if finding.file else None
        return Ignored(finding, "per-file-ignores", pattern) if pattern else None

    def run_checks(self, source: Source, subject: Any) -> None:
        """Run the checks for a log, a run, or this machine; `hidden` applies to scripts only."""
        ids = self.settings.select | self.settings.hidden

        def note(check: str, error: Exception) -> None:
            self.failures.append(Failure(source, f"check {check} failed: {error!r}", check))

        self.add(apply(source, subject, ids=ids, on_error=note))

    def close(
        self, subject: str, ways: Sequence[Source], checked: str, not_checked: str, **more: Any
    ) -> Diagnosis:
        return Diagnosis(
            subject,
            tuple(ways),
            tuple(ordered(list(dict.fromkeys(self.findings)))),
            checked,
            not_checked,
            ignored=tuple(dict.fromkeys(self.ignored)),
            hidden=dict(self.hidden),
            failures=tuple(dict.fromkeys(self.failures)),
            notes=tuple(dict.fromkeys(self.notes)),
            sources=self.sources,
            **more,
        )


def check_paths(paths: Sequence[Path], settings: Settings | None = None) -> Diagnosis:
    """Check any mix of scripts, folders, run folders, and logs."""
    given = sort_paths(paths)
    case = Case(settings)
    ways: list[Source] = []
    checked, not_checked = [], []
    if given.scripts or given.projects:
        ways.append("script")
        checked.append(_check_scripts(case, given))
        not_checked.append(_beyond_scripts(given))
    if given.runs:
        from paralab.doctor.recorded import Recorded

        ways.append("run")
        for folder in given.runs:
            case.run_checks("run", Recorded.read(folder))
        checked.append(f"{plural(len(given.runs), 'recorded run')} for {_number('run')}")
        not_checked.append("the script of the run (`paralab doctor SCRIPT.py` checks it)")
    if given.logs:
        from paralab.doctor.logs.reading import read_logs

        ways.append("log")
        logs = read_logs(given.logs)
        case.notes += logs.notes
        case.run_checks("log", logs)
        checked.append(f"{plural(len(given.logs), 'log')} for {_number('log')}")
        not_checked.append("failures that print nothing")
    subject = (
        ", ".join(map(str, paths)) if len(paths) < 4 else f"{paths[0]} and {len(paths) - 1} more"
    )
    return case.close(subject, ways, "; ".join(checked), "; ".join(not_checked))


def accept_findings(paths: Sequence[Path], settings: Settings) -> Diagnosis:
    path = settings.baseline
    if path is None:
        raise UsageError(
            "--write-baseline needs the name of a file.",
            fix="--baseline doctor-baseline.json --write-baseline",
        )
    every = check_paths(paths, replace(settings, baseline=None))
    number = write_baseline(path, every.findings, settings, every.sources)
    left = check_paths(paths, settings)
    return replace(left, notes=(*left.notes, f"Wrote {plural(number, 'finding')} to {path}."))


def _check_scripts(case: Case, given: PathsByKind) -> str:
    """Check the scripts and folders, and return a description of what was checked."""
    settings = case.settings
    ids = settings.select | settings.hidden
    scripts = [path for path in given.scripts if not settings.excludes(path)]
    parts = [plural(len(scripts), "script")] if given.scripts else []
    excluded = len(given.scripts) - len(scripts)
    for path in scripts:
        case.sources.text(str(path))  # the report and the patch use the same text as the checks
    results = check_scripts(scripts, ids)
    for folder in given.projects:
        found = find_files(folder)
        files = [path for path in found.parallel if not settings.excludes(path)]
        excluded += len(found.parallel) - len(files)
        results += check_project(folder, files, ids)
        many = plural(found.python, "Python file")
        parts.append(f"{len(files)} of {many} (those that train in parallel)")
    if len(results) == 1 and not results[0].modules and results[0].failures:
        raise UsageError(results[0].failures[0].reason, fix="a script that Python can parse")
    case.add(merge(results), off=settings.hidden)
    case.failures += [failure for result in results for failure in result.failures]

    modules = {module for result in results for module in result.modules}
    looked_for = checked_ids("script") & settings.select
    case.notes += case.comments.notes([str(result.path) for result in results], looked_for)
    stale = case.baseline.stale(modules)
    if stale:
        entries = plural(stale, "entry")
        case.notes.append(
            f"{settings.baseline}: {entries} no longer needed; --write-baseline removes them."
        )
    if excluded:
        parts.append(f"{plural(excluded, 'file')} excluded")
    return f"{', '.join(parts)}, for {_number('script')}"


def _beyond_scripts(given: PathsByKind) -> str:
    beyond = len(ENTRIES.keys() - checked_ids("script"))
    alone = len(given.scripts) == 1 and not given.projects
    script = given.scripts[0] if alone else "SCRIPT.py"
    return (
        f"{beyond} failures that only appear when a script runs "
        f"(`paralab doctor --try 3 -- torchrun --nproc_per_node=2 {script}`)"
    )


def observe(
    command: Sequence[str],
    *,
    steps: int | None,
    stall_seconds: float | None,
    folder: Path | None,
    say: Say,
    settings: Settings | None = None,
) -> Diagnosis:
    """Run the command unchanged, watch its ranks, and report findings while it runs."""
    from paralab.doctor import watch

    case = Case(settings)
    wanted = case.settings.select | case.settings.hidden

    def report(finding: Finding) -> None:
        if finding.id in wanted and not case.ignore(finding):
            say(finding)

    with (
        nullcontext(folder)
        if folder
        else TemporaryDirectory(prefix="paralab-doctor-", ignore_cleanup_errors=True) as place
    ):
        observed = watch.observe(
            command, folder=Path(place), steps=steps, stall_seconds=stall_seconds, say=report
        )
    case.add([finding for finding in observed.findings if finding.id in wanted])
    case.notes += observed.notes
    many = f" for {plural(steps, 'step')}" if steps else ""
    cost = ""
    if observed.cost is not None:
        cost = f" (by their own clocks, watching took {observed.cost:.1%} of their time)"
    checked = f"the ranks while they trained{many}{cost}, for {_number('ranks')}"
    return case.close(
        shlex.join(command),
        ("ranks",),
        "nothing" if watch.NO_RANKS in observed.notes else checked,
        "branches that did not run (`paralab doctor SCRIPT.py` checks them)",
        command_exit_code=observed.exit_code,
    )


def attach(pid: int) -> Diagnosis:
    from paralab.doctor import attach as attachment

    case = Case()
    findings, notes = attachment.attach(pid)
    case.add(findings)
    case.notes += notes
    return case.close(
        f"process {pid}",
        ("ranks",),
        "the ranks' stacks, and their collectives if they were recorded",
        "how the job got here (`paralab doctor -- COMMAND` shows it)",
    )


def preflight(settings: Settings | None = None) -> Diagnosis:
    from paralab.doctor import preflight

    case = Case(settings)
    facts = preflight.gather_facts()
    case.run_checks("machine", facts)
    return case.close(
        "this machine",
        ("machine",),
        f"devices, backends, ports, memory, cores, and links, for {_number('machine')}",
        "training code (pass a script, a folder, a run folder, logs, or -- COMMAND)",
        facts=tuple(preflight.table(facts, case.findings)),
    )


def _number(source: Source) -> str:
    return plural(len(checked_ids(source)), "failure")
