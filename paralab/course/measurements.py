"""A practical's evidence: the rows of its comparison by name, with what their events show; and the
parts that are told from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import asdict, replace

from paralab.analyse import figures
from paralab.analyse.blocks import Block, Evidence, Section
from paralab.analyse.compare import Comparison
from paralab.analyse.compare import Row as MeasuredRow
from paralab.analyse.confidence import Ratio, speed_up
from paralab.analyse.events_summary import EventsSummary, summarize
from paralab.analyse.recording import Recording
from paralab.analyse.verdict import largest_memory
from paralab.analyse.verify import apart_from


class Row(MeasuredRow, frozen=True, kw_only=True):
    """A measured configuration with what the events of its last round show."""

    observed: EventsSummary


@dataclass(frozen=True)
class Measurements:
    rows: dict[str, Row]
    missing: dict[str, str]  # the reason why a configuration has no row
    comparison: Comparison
    folder: Path

    @classmethod
    def of(cls, comparison: Comparison, folder: Path) -> Measurements:
        missing = {each.name: each.reason for each in comparison.left_out}
        missing |= {each.name: f"it failed: {each.error}" for each in comparison.failed}
        rows = {}
        for row in comparison.rows:
            observed = summarize(Recording.read(folder / row.runs[-1]))
            rows[row.name] = Row(**asdict(row), observed=observed)
        return cls(rows, missing, comparison, folder)

    def __getitem__(self, name: str) -> Row:
        return self.rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def given(self, *names: str) -> list[Row]:
        return [self.rows[name] for name in names if name in self.rows]

    def why_not(self, name: str) -> str:
        return self.missing.get(name, "it was not asked for")

    def ratio(self, before: str, after: str) -> Ratio:
        """How many times as fast the second set-up is, from the rounds that both were measured
        in."""
        return speed_up(self.rows[before].round_seconds, self.rows[after].round_seconds)

    def recordings(self, name: str) -> list[Recording]:
        """Every round of a set-up, for figures."""
        return [Recording.read(self.folder / run) for run in self.rows[name].runs]


@dataclass(frozen=True)
class LabPart:
    """One part of a practical: the set-ups without which it cannot be told, those that it tells of
    if they ran, and how."""

    title: str
    text: str  # what is done, not what comes out: it also stands on the empty sheet
    needs: tuple[str, ...]
    tell: Callable[[Measurements], Sequence[Block]]
    likes: tuple[str, ...] = ()


def tell(parts: Sequence[LabPart], lab: Measurements) -> tuple[Section, ...]:
    """The sections of the parts that were asked for. One whose set-up failed says so."""
    chosen = lab.comparison.about.parts or range(1, len(parts) + 1)
    sections = []
    for number in chosen:
        part = parts[number - 1]
        title = f"Part {number}: {part.title}"
        lacking = [name for name in part.needs if name not in lab]
        if lacking:
            reasons = "; ".join(f"{name}: {lab.why_not(name)}" for name in lacking)
            sections.append(Section(title, (), f"Not measured. {reasons}"))
        else:
            sections.append(Section(title, tuple(part.tell(lab)), part.text))
    return tuple(sections)


def memory_of(row: MeasuredRow) -> int:
    """The fullest device's bytes: counted tensors on a CPU, the allocator's peak on a GPU. A row
    that was trained has them."""
    found = largest_memory(row)
    assert found is not None
    return found


def memory_words(row: Row) -> str:
    """How the bytes were found, for a note under a table."""
    if row.peak_bytes[0].how == "allocator":
        return "Memory: the peak of PyTorch's CUDA allocator."
    return "Memory: counted tensors (parameters, gradients, optimizer, activations); on a CPU nothing else can be told per device."


def remarks_of(rows: Sequence[Row]) -> str:
    """What is virtual, emulated or shared in these set-ups, once each."""
    return "; ".join(
        dict.fromkeys(remark for row in rows for remark in row.remarks)
    )  # in the order in which they came


def sharing(row: MeasuredRow) -> str:
    """Why more devices cannot be faster here, where that is so."""
    return next(
        (remark for remark in row.remarks if remark.startswith(("the devices share", "shared:"))),
        "",
    )


def same_training(row: Row) -> str:
    """`equal to one device within 7e-18 after 3 steps in fp64`."""
    proof = row.verify
    if not proof:
        return "not proved"
    if not proof.equal:
        return f"not equal to one device: {proof.cause}"
    apart = f", apart from {reason}" if (reason := apart_from(proof)) else ""
    return f"equal to one device{apart} (largest difference of a parameter {proof.max_difference:.1e}, in fp64)"


def is_equal(row: Row) -> bool | None:
    """None: not checked."""
    return None if row.verify is None else row.verify.equal


def max_difference(row: Row) -> float | None:
    return None if row.verify is None else row.verify.max_difference


def proof_evidence(row: Row) -> Evidence:
    return {"equal": is_equal(row), "max_difference": max_difference(row)}


def drawn_split(row: Row) -> list[Block]:
    picture = figures.split(row.batch, row.ranks)
    return [replace(picture, title=f"{row.name}: {picture.title}")]


def drawn(
    lab: Measurements, name: str, draw: Callable[[list[Recording]], Block | None]
) -> list[Block]:
    """A picture of a set-up's rounds, where there is something to draw."""
    recordings = lab.recordings(name)
    picture = draw(recordings) if recordings else None
    return [picture] if picture else []


def memory_parts(row: Row) -> dict[str, int]:
    """What the first device holds, by kind; empty where only the allocator's peak is known."""
    kinds = {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "activations": "activations",
    }
    entry = row.peak_bytes[0]
    return {words: int(entry[kind]) for kind, words in kinds.items() if entry[kind]}
