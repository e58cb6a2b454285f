"""Variables of the environment that a script sets itself: `os.environ[…] = …`, `update`,
`setdefault`, `os.putenv`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.script.questions import is_dotted
from paralab.doctor.script.reading import Script
from paralab.doctor.script.values import Constant, Happening, Mapping, Value

_NAMED = ("os.putenv", "os.environ.setdefault", "os.environ.__setitem__")


def settings(script: Script) -> Iterator[tuple[str, Value, Happening]]:
    """(name, value, where), for the names that can be read."""
    for store in script.stores:
        if (
            store.name == "[]"
            and is_dotted(store.base, "os.environ")
            and isinstance(store.node, ast.Subscript)
        ):
            key = store.node.slice
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, store.value, store
    for call in script.calls_of(*_NAMED):
        if len(call.args) > 1 and isinstance(call.args[0], Constant):
            yield str(call.args[0].value), call.args[1], call
    for call in script.calls_of("os.environ.update"):
        given = [
            entry
            for value in call.args
            if isinstance(value, Mapping)
            for entry in value.entries.items()
        ]
        for name, value in (*given, *call.keywords.items()):
            yield str(name), value, call
