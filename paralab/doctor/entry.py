"""An entry of the catalogue: one way in which parallel training goes wrong, in words. Rules refer
to it by its id."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """`wrong` and `right` are a few lines of code that differ in the fix only. `limits`: what no
    rule here can see, and why."""

    id: str
    title: str
    symptom: str  # what the user sees
    cause: str
    fix: str
    wrong: str
    right: str
    sources: tuple[str, ...] = ()  # owner/repository#number
    silent: bool = False  # no existing tool reports it on a plain PyTorch script
    limits: str | None = None
