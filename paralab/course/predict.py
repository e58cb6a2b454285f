"""Predict, run, compare: a student predicts each answer, then sees the prediction next to the
measurement. One run measures all parts, but hides the results of a part until the student has
predicted them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from paralab.analyse.blocks import Answer, Block, Document, Section, Table
from paralab.course.check import find_answer, part_number
from paralab.course.sheet_text import WrittenPart, parse, read_sheet
from paralab.errors import UsageError
from paralab.record.types import read_object

Predictions = dict[str, str]  # keys look like `Part 3: Compare | a) Is DataParallel faster?`
FILE = "predictions.json"


def from_sheet(path: Path, sheet: Document) -> Predictions:
    """Read the predictions from a sheet: its `Predicted: …` lines, or else its answers."""
    written = parse(read_sheet(path))
    predicts = any(text for part in written.values() for text in part.predictions.values())
    predictions = {}
    for section in sheet.sections:
        own = written.get(part_number(section.title), WrittenPart())
        for question in _questions(section):
            text = find_answer(question, own.predictions if predicts else own.answers)
            if text.strip():
                predictions[f"{section.title} | {question}"] = text.strip()
    if not predictions:
        fix = "write what you expect after `Predicted:`"
        raise UsageError(f"{path} has no prediction.", fix=fix)
    return predictions


def ask(section: Section, prompt: Callable[..., Any] = click.prompt) -> Predictions:
    """Ask for a prediction for each question in one part. An empty line skips the question."""
    predictions = {}
    width = shutil.get_terminal_size().columns
    click.echo(f"\n{section.title}\n{click.wrap_text(section.text.replace('`', ''), width)}")
    for name, question in _questions(section).items():
        text = str(prompt(f"{question}\n  Your prediction", default="", show_default=False))
        if text.strip():
            predictions[f"{section.title} | {name}"] = text.strip()
    return predictions


def write_predictions(folder: Path, predictions: Predictions) -> None:
    (folder / FILE).write_text(json.dumps(predictions, ensure_ascii=False), encoding="utf-8")


def read_predictions(folder: Path) -> Predictions:
    path = folder / FILE
    return {key: str(text) for key, text in read_object(path).items()} if path.exists() else {}


def add_predictions(document: Document, predictions: Mapping[str, str]) -> Document:
    """Add each prediction to its answer or table in the document."""

    def add(section: Section, block: Block) -> Block:
        if isinstance(block, Answer):
            text = predictions.get(f"{section.title} | {block.question}", block.prediction)
            return replace(block, prediction=text)
        name = f"{section.title} | {block.title}"
        if isinstance(block, Table) and name in predictions:
            return replace(block, note=f"Predicted: {predictions[name]}. {block.note}")
        return block

    sections = [
        replace(section, blocks=tuple(add(section, block) for block in section.blocks))
        for section in document.sections
    ]
    return replace(document, sections=tuple(sections))


def _questions(section: Section) -> dict[str, str]:
    """Return the prompts by the title of their block: each question, or else the first table."""
    answers, tables = section.of(Answer), section.of(Table)
    if answers or not tables:
        return {answer.question: answer.question for answer in answers}
    return {tables[0].title: f"What do you expect? ({', '.join(tables[0].columns[1:])})"}
