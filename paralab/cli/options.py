"""Click options: derived from dataclass fields, or shared by multiple commands.

Options have no defaults here, because the dataclass defines the defaults. An option that was not
given is None.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from paralab.cli.command import NO_BREAK, Option
from paralab.errors import UsageError
from paralab.launch.run_options import OUTPUT, RunOptions
from paralab.plan.option import Option as Described
from paralab.plan.option import options_of
from paralab.plan.request import DEVICES, STRATEGIES, Request
from paralab.record.types import Record
from paralab.units import parse_size

Decorator = Callable[[Any], Any]
R = TypeVar("R", bound=Record)
METAVARS = {int: "N", float: "NUMBER", Path: "DIR"}
STRATEGY = click.argument("strategy", metavar="|".join(STRATEGIES))

# The types of options that are not dataclass fields, with the types' names in the help.
Value = dict[str, Any]
COUNT: Value = {"type": click.IntRange(1), "metavar": "N"}
SECONDS: Value = {"type": click.FloatRange(0, min_open=True), "metavar": "SECONDS"}
DIR: Value = {"type": click.Path(file_okay=False, path_type=Path), "metavar": "DIR"}
FILE: Value = {
    "type": click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    "metavar": "FILE",
}

SHORT = 30  # defaults up to this many characters are not wrapped


def flag(names: str, heading: str, help: str, shown: str = "", **attributes: Any) -> Decorator:
    """Define one option. Without `attributes`, it is a switch. The help shows `shown` as its
    default."""
    if shown:
        words = f"[default: {shown}]"
        # A short default stays on one line. Click would cut a long default in the middle of a word.
        help += " " + (words if len(words) > SHORT else words.replace(" ", NO_BREAK))
    attributes = attributes or {"is_flag": True}
    return click.option(*names.split(), cls=Option, heading=heading, help=help, **attributes)


def options_from(owner: type, *names: str, **changes: dict[str, Any]) -> Decorator:
    """Add a dataclass's options, or only those with these names.

    `changes` overrides the description of individual options: `replicas={"shown": "2 and 3"}`.
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


request_options = partial(options_from, Request)


def omit_none(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def take(owner: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove a dataclass's options from `options`, and return those that the user gave."""
    return omit_none({each.name: options.pop(each.name) for each in options_of(owner)})


def _to_click(each: Described) -> Decorator:
    strategies = f" ({', '.join(each.strategies)})" if each.strategies else ""
    text = each.help.removesuffix(".") + strategies + "."
    value: Value = {
        "type": click.Path(path_type=Path) if each.kind is Path else each.kind,
        "metavar": "|".join(map(str, each.choices)) or each.metavar or METAVARS.get(each.kind),
    }
    if each.kind is bool:
        value = {"is_flag": True, "default": None}
    default = each.describe_default() or ""
    return flag(f"{each.flag} {each.name}", each.heading, text, default, **value)


def printer(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints progress on stderr, above any progress bar, unless `quiet`."""
    from paralab.show.console import errors

    if quiet:
        return lambda line: None
    return lambda line: errors.print(line, markup=False, emoji=False, soft_wrap=True)


def _to_bytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    if text is None or (value := parse_size(text)) is not None:
        return None if text is None else value
    problem = f"--device-memory {text} is not a size."
    raise UsageError(problem, fix="--device-memory 16GB, or 16GiB")


OUT = options_from(RunOptions, "out")
DEVICE_MEMORY = flag(
    "--device-memory device_memory",
    DEVICES,
    "Memory per device. Shows what fits, and the largest batch that fits.",
    "the GPU's memory",
    metavar="SIZE, such as 16GB",
    callback=_to_bytes,
)
JSON = flag("--json as_json", OUTPUT, "Print a single JSON object on stdout.")


def emit(result: R, as_json: bool, show: Callable[[R], None]) -> None:
    """Print a result as JSON on stdout, or show it as text."""
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        show(result)
