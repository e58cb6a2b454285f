"""The corpus: scripts with one mistake each, and their healthy twins. Comments in the scripts say
what the doctor must find.

    corpus/H03/broken.py              first line: `# ways: script, ranks` (of script, ranks, log)
  corpus/H03/healthy.py             the same script with the fix, and nothing to find
  corpus/H03/variant_helper.py      the same mistake written differently; or variant_trainer/train.py with its modules

A line to which a finding must point ends with `# finds H03`. `# finds H03 rank 1` also gives the
culprit that observed runs must name, and `# finds H03 by script` applies to one way only. A script
without marks has a mistake without a line. torchrun starts the scripts with two ranks. If the
second line is `# start: python`, python starts the script; if it is `# start: never`, the script
needs GPUs and is only read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
HEALTHY = Path(__file__).parent / "healthy"
WAYS = ("script", "ranks", "log")
_mark = re.compile(r"# finds (?P<id>[A-Z]\d\d)(?: rank (?P<rank>\d+))?(?: by (?P<way>\w+))?")


@dataclass(frozen=True)
class Mark:
    """A finding that the doctor must report, at this line of this file."""

    id: str
    file: Path
    line: int
    rank: int | None = None
    way: str | None = None  # the only way that finds it here; None if all ways of the case do


@dataclass(frozen=True)
class Case:
    """`entry`: the id in the catalog. `script`: the file to start or read. Healthy twins have no
    ways and no marks."""

    entry: str
    name: str  # broken, healthy, variant_…
    script: Path
    ways: tuple[str, ...]
    marks: tuple[Mark, ...]
    start: str = "torchrun"

    def __str__(self) -> str:
        return f"{self.entry}-{self.name}"

    def expected(self, way: str) -> set[tuple[str, str, int]]:
        """Return (id, file name, line) of each finding that this way must report."""
        return {
            (mark.id, mark.file.name, mark.line) for mark in self.marks if mark.way in (None, way)
        }


def marks_in(file: Path) -> list[Mark]:
    return [
        Mark(
            found["id"],
            file,
            number,
            None if found["rank"] is None else int(found["rank"]),
            found["way"],
        )
        for number, text in enumerate(file.read_text().splitlines(), 1)
        for found in _mark.finditer(text)
    ]


def _case(script: Path) -> Case:
    alone = script.name != "train.py"
    files = [script] if alone else sorted(script.parent.glob("**/*.py"))
    first, second = script.read_text().split("\n", 2)[:2]
    start = next(
        (
            line.removeprefix("# start: ")
            for line in (first, second)
            if line.startswith("# start: ")
        ),
        "torchrun",
    )
    ways = (
        tuple(word.strip() for word in first.removeprefix("# ways:").split(","))
        if first.startswith("# ways:")
        else ()
    )
    folder = script.parent if alone else script.parent.parent
    marks = tuple(mark for file in files for mark in marks_in(file))
    return Case(
        folder.name, script.stem if alone else script.parent.name, script, ways, marks, start
    )


def cases() -> list[Case]:
    """Return the whole corpus, in the order of the catalog."""
    alone = [
        path
        for path in CORPUS.glob("*/*.py")
        if path.name.startswith(("broken", "healthy", "variant_"))
    ]
    return sorted(map(_case, [*alone, *CORPUS.glob("*/variant_*/train.py")]), key=str)


def broken(way: str) -> list[Case]:
    """Return the cases that this way must find."""
    return [case for case in cases() if way in case.ways]


def healthy() -> list[Case]:
    """Return the twins, in which the doctor must find nothing."""
    return [case for case in cases() if case.name.startswith("healthy")]
