"""`Option`: all that paralab says about an option, kept on the dataclass field with its value.

    replicas: int | None = option("Copies of the model that share each batch.", ...)

The command line, the Python signatures, the words of a Slurm job, and the label of a configuration
are derived from such fields, so every option is written once.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

METADATA = "option"


@dataclass(frozen=True)
class Option:
    """One option, as its field describes it.

    heading     under which `--help` lists it
    default     of the field
    strategies  that know it; empty: all of them
    usual       what the plan uses if the option is not given, if that is a fixed value
    shown       the text for `[default: …]`, if it is neither the default nor the usual value
    label       turns a value into its part of a label; None: the label does not mention it
    always      the label mentions the usual value as well
    name        of the field and the Python argument; the flag is made from it
    kind        int, float, str, bool, or Path; the value may also be None if that is the default
    """

    help: str
    heading: str
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    usual: Any = None
    shown: str | None = None
    label: Callable[[Any], str] | None = None
    always: bool = False
    name: str = ""
    kind: type = str

    @property
    def annotation(self) -> Any:
        """The type of the Python argument; a path may be a string."""
        accepted: Any = str | Path if self.kind is Path else self.kind
        return accepted | None if self.default is None else accepted

    @property
    def flag(self) -> str:
        """`batch_size` -> `--batch-size`."""
        return flag_of(self.name)

    def applies_to(self, strategy: str) -> bool:
        return not self.strategies or strategy in self.strategies

    def describe_default(self) -> str | None:
        """The text for `[default: …]`, if there is one."""
        value = self.default if self.usual is None else self.usual
        if self.shown or value is None or isinstance(value, bool):
            return self.shown
        return f"{value:g}" if isinstance(value, float) else str(value)


def option(help: str, heading: str, default: Any = None, **more: Any) -> Any:
    """A dataclass field that is an option; see `Option` for the arguments."""
    return field(default=default, metadata={METADATA: Option(help, heading, default, **more)})


@cache
def options_of(owner: type[Any]) -> tuple[Option, ...]:
    """The options among the fields of a dataclass, in their order."""
    hints = typing.get_type_hints(owner)
    return tuple(
        replace(each.metadata[METADATA], name=each.name, kind=_kind(hints[each.name]))
        for each in fields(owner)
        if METADATA in each.metadata
    )


def to_words(given: Any) -> list[str]:
    """The options of a dataclass as words of a command; those with their default are left out."""
    words: list[str] = []
    for each in options_of(given.__class__):
        value = getattr(given, each.name)
        if value is None or value == each.default:
            continue
        if isinstance(value, float):
            value = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        words += [each.flag] if value is True else [each.flag, str(value)]
    return words


def flag_of(name: str) -> str:
    """`batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def _kind(hint: Any) -> type:
    """`int | None` -> int."""
    if not isinstance(hint, types.UnionType):
        return typing.cast(type, hint)
    [kind] = [each for each in typing.get_args(hint) if each is not type(None)]
    return typing.cast(type, kind)
