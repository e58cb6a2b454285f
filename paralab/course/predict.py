"""Ask for predictions before measuring a practical: people learn from surprises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from msgspec.structs import replace

from paralab.analyse.blocks import Answer, Block, Document


def ask(sheet: Document, prompt: Callable[..., Any] = click.prompt) -> dict[str, str]:
    """Ask for a prediction for each question on a blank sheet. An empty line skips it."""
    predictions = {}
    for section in sheet.sections:
        questions = [block.question for block in section.blocks if isinstance(block, Answer)]
        if questions:
            click.echo(f"\n{section.title}\n{section.text}")
        for question in questions:
            said = str(prompt(f"{question}\n  Your prediction", default="", show_default=False))
            if said.strip():
                predictions[f"{section.title} | {question}"] = said.strip()
    return predictions


def add_predictions(document: Document, predictions: Mapping[str, str]) -> Document:
    """Add each prediction to its answer in the document."""

    def with_prediction(title: str, block: Block) -> Block:
        said = isinstance(block, Answer) and predictions.get(f"{title} | {block.question}")
        if not isinstance(block, Answer) or not said:
            return block
        return replace(block, prediction=said)

    sections = [
        replace(section, blocks=tuple(with_prediction(section.title, b) for b in section.blocks))
        for section in document.sections
    ]
    return replace(document, sections=tuple(sections))
