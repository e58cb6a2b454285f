"""Plain data types for everything that a page or a terminal shows. A document has sections, and a
section has blocks: tables, answers, and charts.

An analysis creates a `Document`; the terminal, Markdown, and the HTML page each render it. Times
are in seconds, sizes in bytes. An unknown number is None, and the text next to it says why.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paralab.record.types import Record

# The numbers behind a sentence, by name. Each sentence chooses its names; a value can have any JSON
# type.
Evidence = dict[str, Any]


class _Block(Record, frozen=True, tag_field="block", tag=str.lower):
    """In JSON, `block` names the kind of block: `table`, `bars`, …"""


class Cell(Record, frozen=True):
    """A table cell: its text and the number behind it. A measured number has a spread: p10 … p90 or
    a confidence interval. A number without a spread is exact (a count, a split)."""

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
    """A question, its answer in one or two sentences, and the numbers behind it. `verdict` is set
    only for yes-or-no questions."""

    question: str
    text: str
    evidence: Evidence
    verdict: bool | None = None
    terms: tuple[str, ...] = ()  # a right answer contains one word from each: "backward|gradient"
    choice: str | None = None  # the chosen alternative, for a which-one question
    options: tuple[
        str, ...
    ] = ()  # the alternatives with their aliases: "DDP|DistributedDataParallel"
    undecided: bool = False  # the timings are too noisy to answer
    prediction: str = ""  # the student's prediction before measuring


class Bar(Record, frozen=True):
    label: str
    value: float | None
    low: float | None = None  # error bar limits
    high: float | None = None
    text: str = ""  # printed next to the bar


class Bars(_Block, frozen=True):
    """Horizontal bars with error bars. `reference` draws a line at this value (1.0 is as fast as
    one device)."""

    title: str
    bars: tuple[Bar, ...]
    unit: str
    reference: float | None = None
    note: str = ""


class Group(Record, frozen=True):
    label: str
    values: tuple[float, ...]


class Distribution(_Block, frozen=True):
    """Each measured value as a dot, with median and quartiles. One row per group, on a common
    axis."""

    title: str
    groups: tuple[Group, ...]
    unit: str
    note: str = ""


class Span(Record, frozen=True):
    """A span on a timeline lane. `exposed` means that the device is waiting for communication."""

    lane: int
    kind: str  # forward, backward, all_reduce, optimizer, wait, data, scatter, replicate, …
    label: str
    start: float
    end: float
    exposed: bool = False
    details: Evidence = msgspec.field(default_factory=dict)


class Timeline(_Block, frozen=True):
    """Lanes (rank 0 · cpu:0, rank 0 · communication, …) on one time axis that can zoom."""

    title: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    steps: tuple[tuple[int, float, float], ...]  # (step, start, end)
    note: str = ""


class Part(Record, frozen=True):
    label: str
    pieces: tuple[int, ...]  # samples per pass or micro-batch; they add up to this device's samples


class Split(_Block, frozen=True):
    """A batch split over the devices, drawn to scale."""

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
    """Curves with a common x axis: losses, load and memory over time, step time over bucket
    size."""

    title: str
    lines: tuple[Line, ...]
    x: str
    y: str
    y_unit: str  # "seconds", "bytes", "share", "number"
    log_x: bool = False
    note: str = ""


class Slot(Record, frozen=True):
    """One cell of a pipeline schedule: the stage, the micro-batch, forward or backward, and the
    time.

    part     the index of the model part, if the stage has several parts
    weights  True for the half of a backward pass that computes weight gradients
    """

    stage: int
    micro: int
    backward: bool
    start: float
    end: float
    part: int = 0
    weights: bool = False


class Schedule(_Block, frozen=True):
    """The pipeline schedule as a grid with one row per stage, measured and ideal. Gaps are the
    bubble."""

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
    """One verdict sentence, with the numbers behind it. `kind` is fastest, cost, limit, next,
    warning, or same."""

    kind: str
    text: str
    evidence: Evidence


class Document(Record, frozen=True):
    title: str
    subtitle: str
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...]
    # The numbers depend on these: machine, versions, command.
    facts: tuple[tuple[str, str], ...] = ()
    run_folder: str | None = None
