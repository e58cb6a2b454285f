"""Predict, run, compare: a student predicts each answer, and then sees the prediction next to the
measurement.

A run measures all parts at once. The results of a part stay hidden until the student has predicted
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from paralab.analyse.blocks import Answer, Block, Document, Section
from paralab.course.check import find_answer, part_number
from paralab.course.sheet_text import WrittenPart, parse
from paralab.errors import UsageError
from paralab.record.types import read_object

Predictions = dict[str, str]  # by `Part 3: Compare | a) Is DataParallel faster?`
FILE = "predictions.json"


def from_sheet(path: Path, sheet: Document) -> Predictions:
    """Read the predictions from a sheet: the lines `Predicted: …`, or the answers if there are no
    such lines."""
    try:
        written = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read {path}: {error}.", fix="a sheet from --blank FILE"
        ) from error
    predicts = any(text for part in written.values() for text in part.predictions.values())
    found = {}
    for section in sheet.sections:
        own = written.get(part_number(section.title), WrittenPart(0))
        for question in _questions(section):
            text = find_answer(question, own.predictions if predicts else own.answers)
            if text.strip():
                found[f"{section.title} | {question}"] = text.strip()
    if not found:
        raise UsageError(
            f"{path} has no prediction.", fix="write what you expect after `Predicted:`"
        )
    return found


def ask(section: Section, prompt: Callable[..., Any] = click.prompt) -> Predictions:
    """Ask for a prediction for each question in one part. An empty line skips the question."""
    predictions = {}
    if _questions(section):
        click.echo(f"\n{section.title}\n{section.text}")
    for question in _questions(section):
        said = str(prompt(f"{question}\n  Your prediction", default="", show_default=False))
        if said.strip():
            predictions[f"{section.title} | {question}"] = said.strip()
    return predictions


def write_predictions(folder: Path, predictions: Predictions) -> None:
    (folder / FILE).write_text(json.dumps(predictions, ensure_ascii=False), encoding="utf-8")


def read_predictions(folder: Path) -> Predictions:
    path = folder / FILE
    return {key: str(text) for key, text in read_object(path).items()} if path.exists() else {}


def add_predictions(document: Document, predictions: Mapping[str, str]) -> Document:
    """Add each prediction to its answer in the document."""

    def add(section: Section, block: Block) -> Block:
        if not isinstance(block, Answer):
            return block
        said = predictions.get(f"{section.title} | {block.question}", block.prediction)
        return replace(block, prediction=said)

    return replace(
        document,
        sections=tuple(
            replace(section, blocks=tuple(add(section, block) for block in section.blocks))
            for section in document.sections
        ),
    )


def _questions(section: Section) -> list[str]:
    return [block.question for block in section.blocks if isinstance(block, Answer)]
