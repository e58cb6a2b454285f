"""Flight Recorder dumps: NCCL's pickle (`nccl_trace_rank_0`), JSON of `_dump_fr_trace_json`, and
torchrun's error files.

A pickle can run any code, so only the plain containers that a recorder writes are built: a class by
name is refused."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from paralab.errors import UsageError

LARGEST = 256 << 20  # bytes


class Refused(pickle.UnpicklingError):
    pass


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise Refused(f"it wants to build {module}.{name}, which no Flight Recorder writes")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise Refused("it refers to objects outside itself")


def looks_like_pickle(start: bytes) -> bool:
    return len(start) > 2 and start[0] == 0x80 and start[1] in (2, 3, 4, 5)


def looks_like_json(start: bytes, name: str) -> bool:
    if not start.lstrip().startswith(b"{"):
        return False
    return name.endswith(".json") or any(
        word in start for word in (b'"entries"', b'"comm_lib_version"', b'"nccl_version"')
    )


def read_dump(path: Path, start: bytes) -> dict[str, Any] | None:
    """The dump as plain containers; None if it is something else."""
    if path.stat().st_size > LARGEST:
        raise UsageError(
            f"{path} is a dump of {path.stat().st_size >> 20} MB; at most {LARGEST >> 20} MB are read."
        )
    try:
        content = path.read_bytes()
        value = (
            PlainUnpickler(io.BytesIO(content)).load()
            if looks_like_pickle(start)
            else json.loads(content)
        )
    except Refused as error:
        raise UsageError(
            f"{path} is a pickle that was not opened: {error}.",
            fix="give the file that NCCL wrote, unchanged",
        ) from error
    except (
        pickle.UnpicklingError,
        OSError,
        ValueError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        MemoryError,
        OverflowError,
    ):
        return None  # torn off in the middle, or another program's
    return value if isinstance(value, dict) else None


def entries(dump: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A dump of several threads or of a newer version may nest; entries that are not entries are
    left out."""
    found = dump.get("entries")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def elastic_error(dump: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """The traceback in torchrun's error.json, and when it was written."""
    message = dump.get("message")
    if not isinstance(message, dict) or not isinstance(extra := message.get("extraInfo"), dict):
        return None
    stamp = str(extra.get("timestamp", ""))
    return str(extra.get("py_callstack", message.get("message", ""))), float(
        stamp
    ) if stamp.isdigit() else None
