"""`paralab doctor`: what is wrong with this script, job, run or log. What stands after -- is a
command to watch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paralab.errors import UsageError
from paralab.record.folder import write_new
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.doctor.report import Diagnosis

COMMAND = "paralab.doctor.command"
FOLDER = click.Path(file_okay=False, path_type=Path)
SARIF_ENDINGS = (".sarif", ".json")


class Watching(click.Command):
    """Keeps the words after -- apart, as they are; and lets --sarif stand alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = args[at + 1 :]
            args = args[:at]
        if "--sarif" in args:
            after = args.index("--sarif") + 1
            if not (args[after:] and (args[after] == "-" or args[after].endswith(SARIF_ENDINGS))):
                args = [*args[:after], "-", *args[after:]]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(
            ctx.command_path,
            "[OPTIONS] [SCRIPT.py | RUN_FOLDER | LOG | LOG_FOLDER]... [-- COMMAND...]",
        )


OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("paths", nargs=-1, type=click.Path(path_type=Path)),
    click.option(
        "--try",
        "steps",
        type=click.IntRange(1),
        metavar="N",
        help="End the watched command after N optimizer steps.",
    ),
    click.option(
        "--stall",
        "stall_seconds",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Call it a hang when no rank got on for so long (watched commands).",
    ),
    click.option(
        "--out",
        type=FOLDER,
        metavar="DIR",
        help="Keep here what was written down on the way (watched commands).",
    ),
    click.option(
        "--attach",
        "pid",
        type=click.IntRange(1),
        metavar="PID",
        help="Ask a job that hangs now: where is who?",
    ),
    click.option(
        "--explain",
        "id",
        metavar="ID|all",
        help="An entry of the catalogue, with wrong and right code; or all titles.",
    ),
    click.option(
        "--fix",
        is_flag=True,
        help="Apply the patches of errors and warnings to the scripts, then read them again.",
    ),
    click.option("--strict", is_flag=True, help="Exit code 1 also for suspects."),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print one JSON object on stdout, and nothing else there.",
    ),
    click.option(
        "--sarif",
        metavar="[FILE.sarif]",
        help="SARIF 2.1.0 for code hosts, into a new file or to stdout.",
    ),
]


def options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command(cls=Watching, short_help="What is wrong with a training script, job, run or log.")
@options
def doctor(
    id: str | None, fix: bool, strict: bool, as_json: bool, sarif: str | None, **what: Any
) -> None:
    """Find what is wrong with a parallel training that was not written for paralab.

    \b
    paralab doctor train.py                        read the script; nothing of it is executed
    paralab doctor -- torchrun … train.py          start it unchanged and watch its ranks
    paralab doctor --try 3 -- torchrun … train.py  the same for three steps
    paralab doctor runs/2026-…                     a recorded run of paralab
    paralab doctor job.log rank*.err               logs, reports and dumps of a job that failed
    paralab doctor --attach 4711                   a job that hangs now
    paralab doctor --explain G01                   an entry of the catalogue
    paralab doctor                                 this machine

    Exit code 0: healthy, or only suspects (1 with --strict). 1: an error or a warning was found, or
    the watched command failed. 2: wrong use. A comment `# paralab: ignore[G01] reason` on a line,
    or alone on the line before, silences a finding there.
    """
    if as_json and sarif == "-":
        raise UsageError("--json and --sarif both print on stdout.", fix="--sarif FILE.sarif")
    command: list[str] | None = click.get_current_context().meta.get(COMMAND)
    _check(command, id, fix, what)
    if id is not None:
        _explain(id, as_json)
        return
    with _stdout_for_us() if as_json or sarif == "-" else nullcontext():
        diagnosis, fixes = _diagnosed(command, fix, **what)
    code = diagnosis.exit_code(strict)
    if sarif:
        from paralab.doctor.show.sarif import as_sarif

        text = json.dumps(as_sarif(diagnosis), indent=1)
        echo(text) if sarif == "-" else write_new(Path(sarif), text + "\n")
    if as_json:
        fixed = {
            "fixed": {"files": fixes.changed, "ids": fixes.ids, "left": fixes.left}
            if fixes
            else None
        }
        click.echo(json.dumps(diagnosis.to_json() | fixed | {"exit_code": code}))
    elif sarif != "-":
        from paralab.doctor.show.findings import print_diagnosis, print_fixes

        if fixes:
            print_fixes(fixes)
        print_diagnosis(diagnosis)
    sys.exit(code)


def _check(command: list[str] | None, id: str | None, fix: bool, what: dict[str, Any]) -> None:
    """One subject, and only options that mean something for it."""
    subjects = {
        "a path": what["paths"],
        "-- COMMAND": command is not None,
        "--attach": what["pid"],
        "--explain": id is not None,
    }
    given = [name for name, value in subjects.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} were both given.", fix="one of them at a time")
    if command == []:
        raise UsageError(
            "There is no command after --.",
            fix="paralab doctor -- torchrun --nproc_per_node=2 train.py",
        )
    for name, option in (("steps", "--try"), ("stall_seconds", "--stall"), ("out", "--out")):
        if what[name] is not None and command is None:
            instead = f"paralab doctor {option} … -- torchrun … train.py"
            raise UsageError(f"{option} is for a command that is watched.", fix=instead)
    if fix and not what["paths"]:
        raise UsageError(
            "--fix changes scripts, and none was given.", fix="paralab doctor --fix train.py"
        )


def _diagnosed(
    command: list[str] | None,
    fix: bool,
    paths: tuple[Path, ...],
    steps: int | None,
    stall_seconds: float | None,
    out: Path | None,
    pid: int | None,
) -> tuple[Diagnosis, Any]:
    from paralab.doctor import diagnosis as looking

    if command is not None:
        from paralab.doctor.show.findings import say_finding

        return looking.observe(
            command, steps=steps, stall_seconds=stall_seconds, folder=out, say=say_finding
        ), None
    if pid is not None:
        return looking.attach(pid), None
    if not paths:
        return looking.preflight(), None
    found = looking.look_at(paths)
    if not fix:
        return found, None
    from paralab.doctor.patch import fix as apply_fixes

    fixes = apply_fixes(found.findings, found.sources)
    return (looking.look_at(paths) if fixes.changed else found), fixes


def _explain(id: str, as_json: bool) -> None:
    from dataclasses import asdict

    from paralab.doctor.known import ENTRIES, entry

    entries = list(ENTRIES.values()) if id.lower() == "all" else [entry(id)]
    if as_json:
        click.echo(json.dumps({"entries": [asdict(known) for known in entries]}))
        return
    from paralab.doctor.show.entry import print_entry, print_titles

    print_titles() if id.lower() == "all" else print_entry(entries[0])


@contextmanager
def _stdout_for_us() -> Iterator[None]:
    """What a watched command prints goes to stderr, so that stdout holds the one object that was
    asked for."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
