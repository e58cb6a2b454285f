"""Places in the user's code that watched ranks report."""

import linecache
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A line. Two calls on the same line have the same place, but different columns (in bytes)."""

    file: str
    line: int
    function: str
    column: int | None = field(default=None, compare=False)

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def is_in_function_of(self, other: "Place") -> bool:
        return (self.file, self.function) == (other.file, other.function)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Site:
    """Where a call came from: up to four frames of the user's code, innermost first. Two calls to
    the same helper share the first frame and differ in the next one."""

    stack: tuple[Place, ...]

    @property
    def place(self) -> Place:
        return self.stack[0]

    @property
    def file(self) -> str:
        return self.stack[0].file

    @property
    def line(self) -> int:
        return self.stack[0].line

    def __str__(self) -> str:
        return str(self.stack[0])
