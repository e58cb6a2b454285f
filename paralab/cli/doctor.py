"""`paralab doctor`: find mistakes in a script, job, run, or log; watch the command after `--`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paralab.cli.command import Command
from paralab.cli.options import COUNT, DIR, FILE, JSON, SECONDS, flag
from paralab.errors import UsageError
from paralab.record.folder import write_new
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.doctor.patch import Fixes
    from paralab.doctor.report import Diagnosis

COMMAND = "paralab.doctor.command"
LAUNCHERS = ("torchrun", "python", "python3", "srun", "mpirun", "accelerate", "deepspeed")
SARIF_ENDINGS = (".sarif", ".json")


class Watching(Command):
    """Keeps the words after `--` for the watched command and allows --sarif without a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = args[at + 1 :]
            args = args[:at]
        elif command := next((a for a in args if a in LAUNCHERS and not Path(a).exists()), None):
            words = args[args.index(command) :]
            problem = f"{command} is a command, but there is no `--` before it."
            raise UsageError(problem, fix=f"paralab doctor -- {shlex.join(words)}")
        if "--sarif" in args:
            after = args.index("--sarif") + 1
            if not (args[after:] and (args[after] == "-" or args[after].endswith(SARIF_ENDINGS))):
                args = [*args[:after], "-", *args[after:]]
        if "--format=json" in args or ("--format", "json") in pairwise(args):
            args = [*args, "--json"]  # an error in the options is also printed as JSON
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(
            ctx.command_path,
            "[OPTIONS] [SCRIPT.py | FOLDER | RUN_FOLDER | LOG | LOG_FOLDER]... [-- COMMAND...]",
        )


JOBS, WHICH, FIXING, OUTPUT = "Running jobs", "Which findings", "Findings", "Output"
FORMATS = ("text", "concise", "json", "sarif", "github")
IDS: dict[str, Any] = {"multiple": True, "metavar": "IDS"}
PATTERN = IDS | {"metavar": "PATTERN"}
PID = COUNT | {"metavar": "PID"}


@click.command(cls=Watching, short_help="Find mistakes in a training script, job, run, or log.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@flag("--try steps", JOBS, "Stop the command after N optimizer steps.", **COUNT)
@flag(
    "--stall stall_seconds",
    JOBS,
    "Report a hang if no rank makes progress for this long.",
    **SECONDS,
)
@flag("--out", JOBS, "Keep the recorded events in DIR.", **DIR)
@flag("--attach pid", JOBS, "Attach to a hung job and see where each rank is stuck.", **PID)
@flag("--select", WHICH, "Report only these ids (H03) or groups (H); ALL reports every id.", **IDS)
@flag("--ignore", WHICH, "Do not report these ids or groups.", **IDS)
@flag("--exclude", WHICH, "Skip paths that match this .gitignore pattern.", **PATTERN)
@flag("--baseline", WHICH, "Report only findings that are not in this file.", **FILE)
@flag(
    "--write-baseline", WHICH, "Accept all current findings by writing them to the baseline file."
)
@flag("--suspects", WHICH, "Also show suspects: problems that the doctor could not confirm.")
@flag("--strict", WHICH, "Show suspects, and exit with code 1 if there are any.")
@flag(
    "--explain id",
    FIXING,
    "Explain a failure, with wrong and correct code, or list all failures.",
    metavar="ID|all",
)
@flag("--fix", FIXING, "Apply the patches for errors and warnings, then check again.")
@flag("--exit-zero", FIXING, "Exit with code 0 even if there are findings.")
@flag(
    "--format style",
    OUTPUT,
    f"Print the findings as {', '.join(FORMATS[:-1])}, or {FORMATS[-1]}.",
    "text",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
)
@JSON
@flag(
    "--sarif",
    OUTPUT,
    "Write SARIF 2.1.0 for code hosts to a new file, or to stdout.",
    metavar="[FILE.sarif]",
)
def doctor(
    id: str | None,
    fix: bool,
    strict: bool,
    suspects: bool,
    exit_zero: bool,
    write_baseline: bool,
    as_json: bool,
    style: str | None,
    sarif: str | None,
    **what: Any,
) -> None:
    """Find mistakes in parallel training code that does not use paralab.

    \b
    paralab doctor .                               check all parallel scripts
    paralab doctor train.py                        read one script
    paralab doctor -- torchrun … train.py          run it and watch its ranks
    paralab doctor --try 3 -- torchrun … train.py  watch three steps, then stop
    paralab doctor runs/2026-…                     check a recorded run
    paralab doctor job.log rank*.err               check a failed job's logs
    paralab doctor --attach 4711                   attach to a hung job
    paralab doctor --explain G01                   explain a failure
    paralab doctor                                 check this machine

    Exit codes: 0 no findings, or only suspects; 1 findings, or the watched command failed; 2 usage
    error.

    The comment `# paralab: ignore[G01] reason` silences a finding on its line. Alone on a line, it
    applies to the next line. [tool.paralab.doctor] in pyproject.toml accepts select, ignore,
    exclude, per-file-ignores, and baseline.
    """
    style = _choose_format(style, as_json, sarif)
    command: list[str] | None = click.get_current_context().meta.get(COMMAND)
    _check(command, id, fix, write_baseline, what)
    if id is not None:
        _explain(id, style == "json")
        return
    with _stdout_for_json() if style in ("json", "sarif") else nullcontext():
        diagnosis, fixes = _diagnose(command, fix, write_baseline, **what)
    code = 0 if exit_zero else diagnosis.exit_code(strict)
    if sarif and sarif != "-":
        from paralab.doctor.show.sarif import as_sarif

        write_new(Path(sarif), json.dumps(as_sarif(diagnosis), indent=1) + "\n")
    _print(diagnosis, fixes, style, suspects or strict or diagnosis.is_undecided_log, code)
    sys.exit(code)


def _choose_format(style: str | None, as_json: bool, sarif: str | None) -> str:
    """Return the one format for stdout. --json and --sarif are short for --format."""
    formats = [style or "", "json" if as_json else "", "sarif" if sarif == "-" else ""]
    chosen = list(dict.fromkeys(filter(None, formats)))
    if len(chosen) > 1:
        problem = f"{' and '.join(chosen)} both print on stdout."
        raise UsageError(problem, fix="only one of them, or --sarif FILE.sarif")
    return chosen[0] if chosen else "text"


def _print(
    diagnosis: Diagnosis, fixes: Fixes | None, style: str, suspects: bool, code: int
) -> None:
    if style == "json":
        fixed = {"fixed": fixes.to_json() if fixes else None}
        click.echo(json.dumps(diagnosis.to_json() | fixed | {"exit_code": code}))
    elif style == "sarif":
        from paralab.doctor.show.sarif import as_sarif

        echo(json.dumps(as_sarif(diagnosis), indent=1))
    elif style == "text":
        from paralab.doctor.show.findings import print_diagnosis, print_fixes

        if fixes:
            print_fixes(fixes)
        print_diagnosis(diagnosis, suspects)
    else:
        from paralab.doctor.show.lines import print_lines

        print_lines(diagnosis, style, suspects, echo)


def _check(
    command: list[str] | None, id: str | None, fix: bool, write_baseline: bool, what: dict[str, Any]
) -> None:
    """Require one subject and only options that apply to it."""
    subjects = {
        "a path": what["paths"],
        "-- COMMAND": command is not None,
        "--attach": what["pid"],
        "--explain": id is not None,
    }
    given = [name for name, value in subjects.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be used together.", fix="one at a time")
    if command == []:
        example = "paralab doctor -- torchrun --nproc_per_node=2 train.py"
        raise UsageError("`--` is not followed by a command.", fix=example)
    for name, option in (("steps", "--try"), ("stall_seconds", "--stall"), ("out", "--out")):
        if what[name] is not None and command is None:
            example = f"paralab doctor {option} … -- torchrun … train.py"
            raise UsageError(f"{option} needs a command to watch.", fix=example)
    for used, option in ((fix, "--fix"), (write_baseline, "--write-baseline")):
        if used and not what["paths"]:
            example = f"paralab doctor {option} train.py"
            raise UsageError(f"{option} needs a script or a folder.", fix=example)


def _diagnose(
    command: list[str] | None,
    fix: bool,
    write_baseline: bool,
    paths: tuple[Path, ...],
    steps: int | None,
    stall_seconds: float | None,
    out: Path | None,
    pid: int | None,
    baseline: Path | None,
    **chosen: tuple[str, ...],
) -> tuple[Diagnosis, Fixes | None]:
    """Examine the watched command, the hung job, the files, or this machine."""
    from paralab.doctor import diagnosis as examining
    from paralab.doctor.settings import read_settings

    settings = read_settings(paths, baseline=baseline, **chosen)
    if command is not None:
        from paralab.doctor.show.findings import say_finding

        limits: dict[str, Any] = {"steps": steps, "stall_seconds": stall_seconds, "folder": out}
        return examining.observe(command, say=say_finding, settings=settings, **limits), None
    if pid is not None:
        return examining.attach(pid), None
    if not paths:
        return examining.preflight(settings), None
    if write_baseline:
        return examining.accept_findings(paths, settings), None
    diagnosis = examining.check_paths(paths, settings)
    if not fix:
        return diagnosis, None
    from paralab.doctor.patch import fix as apply_fixes

    fixes = apply_fixes(diagnosis.findings, diagnosis.sources)
    return (examining.check_paths(paths, settings) if fixes.changed else diagnosis), fixes


def _explain(id: str, as_json: bool) -> None:
    from dataclasses import asdict

    from paralab.doctor.catalog import ENTRIES, entry

    entries = list(ENTRIES.values()) if id.lower() == "all" else [entry(id)]
    if as_json:
        click.echo(json.dumps({"entries": [asdict(known) for known in entries]}))
        return
    from paralab.doctor.show.entry import print_entry, print_titles

    print_titles() if id.lower() == "all" else print_entry(entries[0])


@contextmanager
def _stdout_for_json() -> Iterator[None]:
    """Send a watched command's output to stderr, so stdout contains only one object."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
