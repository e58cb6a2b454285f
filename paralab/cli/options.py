"""Click options, derived from the fields that describe them, and those that several commands share.

No option has a default here: one that was not given is None, and the dataclass knows the default.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paralab.cli.command import NO_BREAK, Option
from paralab.launch.run_options import OUTPUT, RunOptions
from paralab.plan.option import Option as Described
from paralab.plan.option import options_of
from paralab.plan.request import STRATEGIES, Request

Decorator = Callable[[Any], Any]
STRATEGY = click.argument("strategy", metavar="|".join(STRATEGIES))
JSON = click.option(
    "--json",
    "as_json",
    is_flag=True,
    cls=Option,
    heading=OUTPUT,
    help="Print one JSON object on stdout and nothing else there.",
)


def flag(*names: str, heading: str, help: str, default: str = "", **known: Any) -> Decorator:
    """An option that belongs to a single command; `default` is what the help shows."""
    text = _with_default(help, default)
    return click.option(*names, cls=Option, heading=heading, help=text, **known)


def options_from(owner: type, *names: str, **changes: dict[str, Any]) -> Decorator:
    """The options of a dataclass, or those of these names.

    `changes` replaces attributes of single options: `replicas={"default": "1,2,4"}`.
    """
    wanted = [each for each in options_of(owner) if not names or each.name in names]

    def decorate(command: Any) -> Any:
        for described in reversed(wanted):
            command = _decorator(described, **changes.get(described.name, {}))(command)
        return command

    return decorate


def request_options(*names: str, **changes: dict[str, Any]) -> Decorator:
    return options_from(Request, *names, **changes)


OUT = options_from(RunOptions, "out")


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user wrote."""
    return {name: value for name, value in options.items() if value is not None}


def take(owner: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a dataclass from all options; return those that the user wrote."""
    return given({each.name: options.pop(each.name) for each in options_of(owner)})


def _decorator(described: Described, **changes: Any) -> Decorator:
    strategies = f" ({', '.join(described.strategies)})" if described.strategies else ""
    text = changes.get("help") or described.help.removesuffix(".") + strategies + "."
    default = changes.get("default") or described.describe_default()
    known: dict[str, Any] = (
        {"is_flag": True, "default": None}
        if described.kind is bool
        else {
            "type": click.Path(path_type=Path) if described.kind is Path else described.kind,
            "metavar": "|".join(described.choices) or described.metavar,
        }
    )
    known |= {name: changes[name] for name in ("type", "metavar") if name in changes}
    return click.option(
        described.flag,
        described.name,
        cls=Option,
        heading=described.heading,
        help=_with_default(text, default),
        **known,
    )


def _with_default(text: str, default: str | None) -> str:
    return f"{text} [default:{NO_BREAK}{default.replace(' ', NO_BREAK)}]" if default else text


def printer(quiet: bool) -> Callable[[str], None]:
    """Prints progress on stderr, above the bar that may be drawn there; or nothing."""
    from paralab.show.console import errors

    if quiet:
        return lambda line: None
    return lambda line: errors.print(line, markup=False, emoji=False, soft_wrap=True)
