"""What there is to tell, as plain data: a document of sections whose blocks are tables, answers and
pictures.

An analysis makes a `Document`; the terminal, Markdown and the HTML page each render it. Times are
seconds, sizes bytes. A number that is not known is None, and the text beside it says why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """What is printed, and the number behind it (what JSON has). A measured number has its spread,
    p10 … p90 or an interval; without one it is exact: a count, a split, a name."""

    text: str
    value: Any = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """A question, its answer in one or two sentences, and the numbers it rests on. `verdict`: yes
    or no, where it is one."""

    question: str
    text: str
    evidence: dict[str, Any]
    verdict: bool | None = None


@dataclass(frozen=True)
class Bar:
    label: str
    value: float | None
    low: float | None = None  # the ends of the error bar
    high: float | None = None
    text: str = ""  # printed at the bar


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with error bars, one below the other. `reference`: a line at this value (1.0
    = as fast as one device)."""

    title: str
    bars: tuple[Bar, ...]
    unit: str
    reference: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Group:
    label: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Distribution:
    """Every measured value as a dot, with median and quartiles, one row per group; one common
    axis."""

    title: str
    groups: tuple[Group, ...]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Span:
    """Something on a lane of the timeline. `exposed` marks waiting for communication that nothing
    hides."""

    lane: int
    kind: str  # forward, backward, all_reduce, optimizer, wait, data, scatter, replicate, gather, reduce
    label: str
    start: float
    end: float
    exposed: bool = False
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Lanes (rank 0 · cpu:0, rank 0 · communication, …) over one time axis that can be zoomed."""

    title: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    steps: tuple[tuple[int, float, float], ...]  # (step, start, end)
    note: str = ""


@dataclass(frozen=True)
class Part:
    label: str
    pieces: tuple[int, ...]  # samples of each pass or micro-batch; their sum is the part's share


@dataclass(frozen=True)
class Split:
    """A batch drawn to scale over the devices."""

    title: str
    total: int
    parts: tuple[Part, ...]
    note: str = ""


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...] = ()  # a band around the line, where there is one
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Curves over a common x: losses, load and memory over time, step time over bucket size."""

    title: str
    lines: tuple[Line, ...]
    x: str
    y: str
    y_unit: str  # "seconds", "bytes", "share", "number"
    log_x: bool = False
    note: str = ""


@dataclass(frozen=True)
class Slot:
    """One piece of work in a pipeline: which stage, which micro-batch, which way, when.

    part     which of the stage's parts of the model, where it has several
    weights  the part of a backward pass that only the weights need
    """

    stage: int
    micro: int
    backward: bool
    start: float
    end: float
    part: int = 0
    weights: bool = False


@dataclass(frozen=True)
class Schedule:
    """The pipeline as a grid, one row per stage, measured and ideal; what is empty is the
    bubble."""

    title: str
    stages: tuple[str, ...]
    measured: tuple[Slot, ...]
    ideal: tuple[Slot, ...]
    measured_bubble: float
    ideal_bubble: float
    note: str = ""


Block = Table | Answer | Bars | Distribution | Timeline | Split | Lines | Schedule


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict, with the numbers it rests on. `kind`: fastest, cost, limit,
    next, warning, same."""

    kind: str
    text: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...]
    facts: tuple[
        tuple[str, str], ...
    ] = ()  # machine, versions, command: what the numbers depend on

    def to_json(self) -> dict[str, Any]:
        """As JSON, every block with its kind."""
        sections = [
            {
                "title": section.title,
                "text": section.text,
                "blocks": [
                    {"block": type(block).__name__.lower(), **asdict(block)}
                    for block in section.blocks
                ],
            }
            for section in self.sections
        ]
        return {**asdict(self), "sections": sections}
