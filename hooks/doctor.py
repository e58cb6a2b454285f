#!/usr/bin/env python3
"""The pre-commit hook checks scripts with plain Python. It does not need any package, not even
torch."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 (an older Python needs a message, not a SyntaxError)
    sys.exit(f"paralab doctor needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class StandIn:
    """Stands for anything in a package that is not installed."""

    __struct_fields__ = ()  # arguments of a msgspec.Struct

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None: ...


class MissingPackage(ModuleType):
    """A failure's file also has its checks of runs and machines. They import packages that reading
    a script does not need."""

    __path__: list[str] = []  # noqa: RUF012 (a package)

    def __getattr__(self, name: str) -> type[StandIn]:
        return StandIn


for package in ("msgspec", "psutil"):
    if find_spec(package) is None:
        sys.modules[package] = MissingPackage(package)
if isinstance(sys.modules.get("msgspec"), MissingPackage):
    sys.modules["msgspec.structs"] = MissingPackage("msgspec.structs")

from paralab.doctor.diagnosis import check_paths  # noqa: E402
from paralab.doctor.settings import read_settings  # noqa: E402
from paralab.doctor.show.lines import concise  # noqa: E402
from paralab.errors import ParalabError  # noqa: E402


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("paralab-doctor")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--strict", action="store_true", help="also fail on suspects")
    parser.add_argument("--select", action="append", default=[], metavar="IDS")
    parser.add_argument("--ignore", action="append", default=[], metavar="IDS")
    given = parser.parse_args(words)
    if not given.files:
        return 0
    try:
        settings = read_settings(given.files, select=given.select, ignore=given.ignore)
        diagnosis = check_paths(given.files, settings)
    except ParalabError as error:
        print(f"paralab doctor: {error}", file=sys.stderr)
        return error.exit_code
    for line in (*concise(diagnosis, given.strict), *diagnosis.notes):
        print(line)
    for failure in diagnosis.failures:
        print(f"paralab doctor: {failure}", file=sys.stderr)
    return diagnosis.exit_code(given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
