"""Answers that are kept with what was asked about, and go with it: many scripts may be read in one
process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")


def remembered(question: Callable[[Thing], Answer]) -> Callable[[Thing], Answer]:
    """A question about one thing, which is worked out once."""
    key = f"{question.__module__}.{question.__name__}"

    @wraps(question)
    def asked(thing: Thing) -> Answer:
        answers = vars(thing)
        if key not in answers:
            answers[key] = question(thing)
        answer: Answer = answers[key]
        return answer

    return asked
