"""Click options, derived from the fields that describe them, and those that several commands share.

No option has a default here: one that was not given is None, and the dataclass knows the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from paralab.cli.command import NO_BREAK, Option
from paralab.launch.run_options import OUTPUT, RunOptions
from paralab.plan.option import Option as Described
from paralab.plan.option import options_of
from paralab.plan.request import STRATEGIES, Request

Decorator = Callable[[Any], Any]
METAVARS = {int: "N", float: "NUMBER"}
STRATEGY = click.argument("strategy", metavar="|".join(STRATEGIES))

SHORT = 30  # characters of a default that is not wrapped


def flag(names: str, heading: str, help: str, shown: str = "", **known: Any) -> Decorator:
    """An option of a single command; `shown` is its default, for the help."""
    if shown:
        words = f"[default: {shown}]"
        # A short default stays on one line. click would cut a long one in the middle of a word.
        help += " " + (words if len(words) > SHORT else words.replace(" ", NO_BREAK))
    return click.option(*names.split(), cls=Option, heading=heading, help=help, **known)


def options_from(owner: type, *names: str, **changes: dict[str, Any]) -> Decorator:
    """The options of a dataclass, or those of these names.

    `changes` describes single options differently: `replicas={"shown": "2 and 3"}`.
    """
    described = [
        replace(each, **changes.get(each.name, {}))
        for each in options_of(owner)
        if not names or each.name in names
    ]

    def decorate(command: Any) -> Any:
        for each in reversed(described):
            command = _to_click(each)(command)
        return command

    return decorate


def request_options(*names: str, **changes: dict[str, Any]) -> Decorator:
    return options_from(Request, *names, **changes)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user wrote."""
    return {name: value for name, value in options.items() if value is not None}


def take(owner: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a dataclass from all options; return those that the user wrote."""
    return given({each.name: options.pop(each.name) for each in options_of(owner)})


def _to_click(each: Described) -> Decorator:
    strategies = f" ({', '.join(each.strategies)})" if each.strategies else ""
    text = each.help.removesuffix(".") + strategies + "."
    known: dict[str, Any] = {
        "type": click.Path(path_type=Path) if each.kind is Path else each.kind,
        "metavar": "|".join(each.choices) or each.metavar or METAVARS.get(each.kind),
    }
    if each.kind is bool:
        known = {"is_flag": True, "default": None}
    return flag(
        f"{each.flag} {each.name}", each.heading, text, each.describe_default() or "", **known
    )


def printer(quiet: bool) -> Callable[[str], None]:
    """Prints progress on stderr, above the bar that may be drawn there; or nothing."""
    from paralab.show.console import errors

    if quiet:
        return lambda line: None
    return lambda line: errors.print(line, markup=False, emoji=False, soft_wrap=True)


OUT = options_from(RunOptions, "out")
JSON = flag(
    "--json as_json",
    OUTPUT,
    "Print one JSON object on stdout and nothing else there.",
    is_flag=True,
)
