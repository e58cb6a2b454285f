"""What a page or a terminal shows, as plain data: a document of sections whose blocks are tables,
answers, and charts.

An analysis makes a `Document`; the terminal, Markdown, and the HTML page each render it. Times are
seconds, sizes are bytes. A number that is unknown is None, and the text next to it says why.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paralab.record.types import Record

# The numbers behind a sentence: the sentence chooses the names, and values have any JSON type.
Evidence = dict[str, Any]


class _Block(Record, frozen=True, tag_field="block", tag=str.lower):
    """In JSON, `block` says which kind of block it is: `table`, `bars`, …"""


class Cell(Record, frozen=True):
    """The text, and the number behind it. A measured number has a spread, p10 … p90 or an interval;
    a number without one is exact: a count, a split, a name."""

    text: str
    value: Any = None
    low: float | None = None
    high: float | None = None


class Table(_Block, frozen=True):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class Answer(_Block, frozen=True):
    """A question, its answer in one or two sentences, and the numbers behind it. `verdict`: for a
    yes-or-no question."""

    question: str
    text: str
    evidence: Evidence
    verdict: bool | None = None
    terms: tuple[str, ...] = ()  # words of which a right answer has one each: "backward|gradient"
    choice: str | None = None  # which of several, where that is the question
    prediction: str = ""  # what a student expected before measuring


class Bar(Record, frozen=True):
    label: str
    value: float | None
    low: float | None = None  # the ends of the error bar
    high: float | None = None
    text: str = ""  # printed next to the bar


class Bars(_Block, frozen=True):
    """Horizontal bars with error bars. `reference`: a line at this value (1.0 = as fast as one
    device)."""

    title: str
    bars: tuple[Bar, ...]
    unit: str
    reference: float | None = None
    note: str = ""


class Group(Record, frozen=True):
    label: str
    values: tuple[float, ...]


class Distribution(_Block, frozen=True):
    """Every measured value as a dot, with median and quartiles: one row per group, one common axis."""

    title: str
    groups: tuple[Group, ...]
    unit: str
    note: str = ""


class Span(Record, frozen=True):
    """A span on a lane of the timeline. `exposed`: the device waits for communication."""

    lane: int
    kind: str  # forward, backward, all_reduce, optimizer, wait, data, scatter, replicate, …
    label: str
    start: float
    end: float
    exposed: bool = False
    details: Evidence = msgspec.field(default_factory=dict)


class Timeline(_Block, frozen=True):
    """Lanes (rank 0 · cpu:0, rank 0 · communication, …) over one time axis with zoom."""

    title: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    steps: tuple[tuple[int, float, float], ...]  # (step, start, end)
    note: str = ""


class Part(Record, frozen=True):
    label: str
    pieces: tuple[int, ...]  # samples of each pass or micro-batch; their sum is the part's share


class Split(_Block, frozen=True):
    """A batch drawn to scale over the devices."""

    title: str
    total: int
    parts: tuple[Part, ...]
    note: str = ""


class Line(Record, frozen=True):
    label: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...] = ()  # a band around the line, if it has one
    high: tuple[float, ...] = ()


class Lines(_Block, frozen=True):
    """Curves over a common x: losses, load and memory over time, step time over bucket size."""

    title: str
    lines: tuple[Line, ...]
    x: str
    y: str
    y_unit: str  # "seconds", "bytes", "share", "number"
    log_x: bool = False
    note: str = ""


class Slot(Record, frozen=True):
    """One piece of work in a pipeline: which stage, which micro-batch, forward or backward, and when.

    part     which part of the model, if the stage has several
    weights  the part of a backward pass that only the weights need
    """

    stage: int
    micro: int
    backward: bool
    start: float
    end: float
    part: int = 0
    weights: bool = False


class Schedule(_Block, frozen=True):
    """The pipeline as a grid with one row per stage, measured and ideal. The gaps are the bubble."""

    title: str
    stages: tuple[str, ...]
    measured: tuple[Slot, ...]
    ideal: tuple[Slot, ...]
    measured_bubble: float
    ideal_bubble: float
    note: str = ""


Block = Table | Answer | Bars | Distribution | Timeline | Split | Lines | Schedule


class Section(Record, frozen=True):
    title: str
    blocks: tuple[Block, ...]
    text: str = ""


class Finding(Record, frozen=True):
    """One sentence of the verdict, with the numbers behind it. `kind`: fastest, cost, limit, next,
    warning, same."""

    kind: str
    text: str
    evidence: Evidence


class Document(Record, frozen=True):
    title: str
    subtitle: str
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...]
    # Machine, versions, command: what the numbers depend on.
    facts: tuple[tuple[str, str], ...] = ()
    run_folder: str | None = None
