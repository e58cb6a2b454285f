"""`Option`: the complete description of an option, stored in the metadata of a dataclass field.

    replicas: int | None = option("Copies of the model; each batch is split among them.", ...)

The command line, the Python signatures, Slurm job scripts, and configuration labels are derived
from these fields, so each option is defined once.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from paralab.errors import UsageError

METADATA = "option"


@dataclass(frozen=True)
class Option:
    """One option, as described by its field.

    heading     the heading in `--help` under which the option appears
    default     the field's default
    strategies  the strategies that accept the option; empty if all do
    usual       the plan's value if the option is not given, or a value per strategy; None if the
                value varies
    shown       the text for `[default: …]`, unless that is the default or the usual value
    label       converts a value to text for a label; None if labels do not mention the option
    always      whether the label also mentions the usual value
    axis        whether the value is a number of devices along one axis of the device grid
    examples    sets of options that `compare --all` tries; if empty, each of the choices
    name        the name of the field and the Python argument; the flag is derived from it
    kind        int, float, str, bool, or Path; if the default is None, the value may also be None
    """

    help: str
    heading: str
    default: Any = None
    metavar: str | None = None
    choices: tuple[str | int, ...] = ()
    strategies: tuple[str, ...] = ()
    usual: Any = None
    shown: str | None = None
    label: Callable[[Any], str] | None = None
    always: bool = False
    axis: bool = False
    examples: tuple[dict[str, Any], ...] = ()
    name: str = ""
    kind: type = str

    @property
    def annotation(self) -> Any:
        """The type of the Python argument. A path may also be a string."""
        accepted: Any = str | Path if self.kind is Path else self.kind
        return accepted | None if self.default is None else accepted

    @property
    def flag(self) -> str:
        """The flag on the command line: `batch_size` -> `--batch-size`."""
        return flag_of(self.name)

    def applies_to(self, strategy: str) -> bool:
        return not self.strategies or strategy in self.strategies

    def usual_for(self, strategy: str) -> Any:
        return self.usual.get(strategy) if isinstance(self.usual, Mapping) else self.usual

    def describe_default(self) -> str | None:
        """Return the text for `[default: …]`, if any."""
        value = self.default if self.usual is None else self.usual
        if self.shown or value is None or isinstance(value, bool):
            return self.shown
        return f"{value:g}" if isinstance(value, float) else str(value)


def option(help: str, heading: str, default: Any = None, **more: Any) -> Any:
    """Define a dataclass field that is an option. See `Option` for the arguments."""
    return field(default=default, metadata={METADATA: Option(help, heading, default, **more)})


@cache
def options_of(owner: type[Any]) -> tuple[Option, ...]:
    """Return a dataclass's options, in the order of its fields."""
    hints = typing.get_type_hints(owner)
    return tuple(
        replace(each.metadata[METADATA], name=each.name, kind=_kind(hints[each.name]))
        for each in fields(owner)
        if METADATA in each.metadata
    )


def check_kind(option: Option, value: object) -> None:
    """Reject a value of another type. Only callers from Python can pass one."""
    if value is None and option.default is None:
        return
    accepted = {float: (int, float), Path: (str, Path)}.get(option.kind, (option.kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and option.kind is not bool):
        expected = " or ".join(kind.__name__ for kind in accepted)
        problem = f"{option.name}={value!r} has the type {type(value).__name__}, not {expected}."
        raise UsageError(problem, fix=f"a value of type {expected}, or leave out {option.name}")


def to_words(given: Any) -> list[str]:
    """Convert a dataclass's options to command-line arguments, omitting defaults."""
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
    """Return the flag on the command line: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def _kind(hint: Any) -> type:
    """Return the type without None: `int | None` -> int."""
    if not isinstance(hint, types.UnionType):
        return typing.cast(type, hint)
    [kind] = [each for each in typing.get_args(hint) if each is not type(None)]
    return typing.cast(type, kind)
