"""Check many scripts in multiple processes. A file that cannot be analyzed becomes one line in the
report."""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from paralab.doctor.catalog import apply, without_garbage_collection
from paralab.doctor.project_files import entry_points
from paralab.doctor.registry import Failure, Finding
from paralab.doctor.static.project import Project
from paralab.doctor.static.script import Script
from paralab.errors import UsageError
from paralab.machine.host import usable_cores

FILES_PER_PROCESS = 24  # starting a process takes about as long as checking this many files
MOST_PARSED = 1000  # keep this many modules in memory, at about 0.5 MB each
TEST_FOLDERS = frozenset(["test", "tests", "testing", "unittests"])
MOST_SECONDS = 5.0  # CPU time per script; few real ones take more than 1 second


class TooLarge(BaseException):
    """A script exceeds a limit. This is not an Exception, because each check catches those."""


@dataclass
class Checked:
    """The result of checking one script and the local modules it imports."""

    path: Path
    findings: list[Finding] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    modules: frozenset[str] = frozenset()  # resolved paths; empty if nothing was analyzed


def check_project(top: Path, files: Sequence[Path], ids: Collection[str]) -> list[Checked]:
    """Check a folder's entry points with the modules they import, then the remaining files. A
    finding in a folder of tests is a suspect, because tests cause failures on purpose."""
    first = entry_points(files)
    results = check_scripts(first, ids)
    covered = {module for result in results for module in result.modules}
    covered.update(os.path.realpath(path) for path in first)
    rest = [path for path in files if os.path.realpath(path) not in covered]
    results += check_scripts(rest, ids)
    for result in results:
        result.findings = [
            replace(one, severity="suspect") if _is_in_tests(one, top) else one
            for one in result.findings
        ]
    return results


def _is_in_tests(finding: Finding, top: Path) -> bool:
    path = os.path.relpath(os.path.realpath(finding.file or top), os.path.realpath(top))
    return not TEST_FOLDERS.isdisjoint(Path(path).parts[:-1])


def check_scripts(paths: Sequence[Path], ids: Collection[str]) -> list[Checked]:
    processes = min(usable_cores(), len(paths) // FILES_PER_PROCESS)
    if processes < 2:
        return _check_part(paths, ids)
    return list(_check_in_processes(paths, ids, processes))


def check_script(path: Path, ids: Collection[str], project: Project) -> Checked:
    """Run the checks that may report one of these ids. Problems become failures, not exceptions."""
    failures: list[Failure] = []

    def note(check: str, error: Exception) -> None:
        if isinstance(error, RecursionError):
            raise TooLarge("it is nested too deeply") from error
        failures.append(Failure(str(path), f"check {check} failed: {_first_line(error)}", check))

    try:
        with _time_limit():
            script = Script(path, project)
            findings = apply("script", script, ids=ids, on_error=note)
    except UsageError as error:
        return Checked(path, failures=[Failure(str(path), error.problem)])
    except TooLarge as error:
        problem = f"{path} is too large to analyze: {error}."
        return Checked(path, failures=[Failure(str(path), problem)])
    except Exception as error:
        problem = f"{path} cannot be analyzed: {_first_line(error)}"
        return Checked(path, failures=[Failure(str(path), problem)])
    modules = frozenset(str(module.path) for module in script.modules)
    vars(script).clear()  # break reference cycles, so that no garbage collector is needed
    return Checked(path, findings, failures, modules)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TooLarge after MOST_SECONDS of CPU time. Without POSIX timers, or outside the main
    thread, there is no limit."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TooLarge(f"the analysis takes more than {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def merge(results: Sequence[Checked]) -> list[Finding]:
    """Return all findings. In a shared module, keep the most certain finding per line and id."""
    best: dict[tuple[str, str, int | None], Finding] = {}
    for finding in (finding for result in results for finding in result.findings):
        place = os.path.realpath(finding.file) if finding.file else ""
        key = (finding.id, place, finding.line)
        known = best.get(key)
        if known is None or finding.uncertainty < known.uncertainty:
            best[key] = finding
    return list(best.values())


def _check_in_processes(
    paths: Sequence[Path], ids: Collection[str], processes: int
) -> Iterator[Checked]:
    """Give each process neighboring files, because files in one folder import the same modules."""
    size = -(-len(paths) // processes)
    context = multiprocessing.get_context("spawn")  # safe with threads, and the same on all systems
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        parts = [
            (part, pool.submit(_check_part, part, frozenset(ids)))
            for part in (paths[at : at + size] for at in range(0, len(paths), size))
        ]
        for part, future in parts:
            try:
                yield from future.result()
            except BrokenProcessPool:
                problem = "cannot be analyzed: its process died"
                yield from (
                    Checked(path, failures=[Failure(str(path), f"{path} {problem}")])
                    for path in part
                )


def _check_part(paths: Sequence[Path], ids: Collection[str]) -> list[Checked]:
    """Check scripts in this process, so that they share parsed modules."""
    project, results = Project(), []
    with without_garbage_collection():
        for path in paths:
            if project.num_parsed > MOST_PARSED:
                project = Project()
                gc.collect()
            results.append(check_script(path, ids, project))
    return results


def _first_line(error: Exception) -> str:
    words = str(error).splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
