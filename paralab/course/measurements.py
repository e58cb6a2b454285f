"""A practical's evidence: the rows of its comparison by name, with what their events show; and the
parts that are told from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paralab.analyse import figures
from paralab.analyse.blocks import Block, Section
from paralab.analyse.confidence import Ratio, speed_up
from paralab.analyse.observed import observed
from paralab.analyse.recording import Recording
from paralab.analyse.verdict import largest_memory
from paralab.analyse.verify import aside

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurements:
    rows: dict[str, Row]  # those that were trained to their end
    missing: dict[str, str]  # the others: why
    comparison: dict[str, Any]
    folder: Path

    @classmethod
    def of(cls, comparison: dict[str, Any], folder: Path) -> Measurements:
        rows, missing = {}, {entry["name"]: entry["reason"] for entry in comparison["left_out"]}
        for row in comparison["rows"]:
            if row["error"]:
                missing[row["name"]] = f"it failed: {row['error']}"
            else:
                seen = row.get("observed") or observed(Recording.read(folder / row["runs"][-1]))
                rows[row["name"]] = row | {"observed": seen}
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
        return speed_up(self.rows[before]["round_seconds"], self.rows[after]["round_seconds"])

    def recordings(self, name: str) -> list[Recording]:
        """Every round of a set-up, for figures."""
        return [Recording.read(self.folder / run) for run in self.rows[name]["runs"]]


@dataclass(frozen=True)
class LabPart:
    """One part of a practical: the set-ups without which it cannot be told, those that it tells of
    if they ran, and how."""

    title: str
    text: str  # what is done, not what comes out: it also stands on the empty sheet
    needs: tuple[str, ...]
    tell: Callable[[Measurements], Sequence[Block]]
    likes: tuple[str, ...] = ()


def tell(parts: Sequence[LabPart], comparison: dict[str, Any], folder: Path) -> tuple[Section, ...]:
    """The sections of the parts that were asked for. One whose set-up failed says so."""
    lab = Measurements.of(comparison, folder)
    chosen = comparison["about"].get("parts") or range(1, len(parts) + 1)
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


def memory_of(row: Row) -> int:
    """The fullest device's bytes: counted tensors on a CPU, the allocator's peak on a GPU. A row
    that was trained has them."""
    found = largest_memory(row)
    assert found is not None
    return found


def memory_words(row: Row) -> str:
    """How the bytes were found, for a note under a table."""
    if row["peak_bytes"][0]["how"] == "allocator":
        return "Memory: the peak of PyTorch's CUDA allocator."
    return "Memory: counted tensors (parameters, gradients, optimizer, activations); on a CPU nothing else can be told per device."


def remarks_of(rows: Sequence[Row]) -> str:
    """What is virtual, emulated or shared in these set-ups, once each."""
    return "; ".join(
        dict.fromkeys(remark for row in rows for remark in row["remarks"])
    )  # in the order in which they came


def sharing(row: Row) -> str:
    """Why more devices cannot be faster here, where that is so."""
    return next(
        (
            remark
            for remark in row["remarks"]
            if remark.startswith(("the devices share", "shared:"))
        ),
        "",
    )


def same_training(row: Row) -> str:
    """`equal to one device within 7e-18 after 3 steps in fp64`."""
    proof = row["parity"]
    if not proof:
        return "not proved"
    if not proof["equal"]:
        return f"not equal to one device: {proof['cause']}"
    apart = f", apart from {reason}" if (reason := aside(proof)) else ""
    return f"equal to one device{apart} (largest difference of a parameter {proof['max_difference']:.1e}, in fp64)"


def drawn_split(row: Row) -> list[Block]:
    picture = figures.split(row)
    return [replace(picture, title=f"{row['name']}: {picture.title}")] if picture else []


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
    entry = row["peak_bytes"][0]
    return {words: int(entry[kind]) for kind, words in kinds.items() if entry.get(kind)}
