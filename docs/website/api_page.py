"""The page about the Python interface, from its signatures and docstrings.

The options come from the `Option` objects that also make the command line, so a generator that only
reads the source would miss them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import Any

import paralab
from paralab import api
from paralab.plan.option import Option

FUNCTIONS: dict[str, Sequence[Option]] = {
    "run": api.ALL,
    "compare": api.CONFIGURATION,
    "verify": api.CONFIGURATION,
    "practical": (),
}
RESULTS = (
    "The functions return the object that the command prints with `--json`: fields as attributes "
    "(`result.steps`), as items (`result['steps']`), or all together (`result.to_dict()`). "
    "[The run folder](run-folder.md#the-result---json) describes the fields. A notebook shows a "
    "result as a table and a chart."
)
INTRODUCTION = f"""# Python interface

The commands as functions, for scripts and notebooks. {RESULTS}

A mistake in the arguments raises `paralab.UsageError`, whose message says what to write instead.
"""


def api_page() -> str:
    parts = [INTRODUCTION]
    for name, options in FUNCTIONS.items():
        parts += function_section(name, getattr(api, name), {each.name for each in options})
    only_run = [option for option in api.ALL if option not in api.CONFIGURATION]
    parts += option_section("Options of run, compare, and verify", api.CONFIGURATION)
    parts += option_section("More options of run", only_run)
    parts += workload_section()
    parts += error_section()
    return "\n".join(parts)


def function_section(name: str, function: Callable[..., Any], options: set[str]) -> Iterator[str]:
    """Show `**options` in place of the options, which have their own sections."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.name not in options]
    words = [str(each) for each in named]
    keywords = [each.kind is Parameter.KEYWORD_ONLY for each in named]
    if any(keywords):
        words.insert(keywords.index(True), "*")
    if options:
        words.append("**options")

    arguments = "".join(f"    {word},\n" for word in words)
    returned = signature.return_annotation.__name__
    yield f"## paralab.{name}\n"
    yield f"```python\nparalab.{name}(\n{_plain(arguments)}) -> {returned}\n```\n"
    yield _docstring(function).partition("\n\nOptions:\n")[0] + "\n"


def option_section(title: str, options: Sequence[Option]) -> Iterator[str]:
    yield f"## {title}\n\n| option | type | default | strategies | meaning |\n|---|---|---|---|---|"
    for option in options:
        kind = option.annotation
        kind = kind.__name__ if isinstance(kind, type) else _plain(str(kind)).replace(" |", " or")
        default = option.describe_default() or f"`{option.default}`"
        strategies = ", ".join(option.strategies) or "all"
        yield _row(f"`{option.name}`", kind, default, strategies, option.help)
    yield ""


def workload_section() -> Iterator[str]:
    """The docstring lists the fields as `name meaning`, with further lines indented."""
    introduction, _, fields = _docstring(paralab.Workload).partition("\n\n")
    yield f"## paralab.Workload\n\n{introduction} [Workloads](workloads.md) has examples.\n"
    yield "| field | meaning |\n|---|---|"
    for name, meaning in re.findall(r"^(\w+) +(.+(?:\n +.+)*)", fields, re.MULTILINE):
        yield _row(f"`{name}`", " ".join(meaning.split()))
    yield ""


def error_section() -> Iterator[str]:
    yield "## Errors\n\n| error | meaning |\n|---|---|"
    for name in paralab.__all__:
        value = getattr(paralab, name)
        if isinstance(value, type) and issubclass(value, Exception):
            yield _row(f"`paralab.{name}`", " ".join(_docstring(value).split()))
    yield ""


def _docstring(value: object) -> str:
    return inspect.getdoc(value) or ""


def _plain(annotation: str) -> str:
    """Remove the modules: `pathlib.Path` -> `Path`."""
    return re.sub(
        r"\b(?:collections\.abc|typing|pathlib|paralab(?:\.\w+)*)\.(?=[A-Z])", "", annotation
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
