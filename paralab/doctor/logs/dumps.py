"""Flight Recorder dumps (NCCL's pickle `nccl_trace_rank_0`, or JSON), and torchrun's error files.

A pickle can run any code, so we build only the plain containers that the recorder writes."""

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from paralab.errors import UsageError

LARGEST = 256 << 20  # bytes; ignore larger dumps
WRITTEN_BY_RECORDERS = (b'"entries"', b'"comm_lib_version"', b'"nccl_version"')


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UsageError(
            f"A pickle was not opened: it contains {module}.{name}, which the Flight Recorder "
            "never writes.",
            fix="pass the file that NCCL wrote, unchanged",
        )


def looks_like_dump(start: bytes, name: str) -> bool:
    if _is_pickle(start):
        return True
    known = name.endswith(".json") or any(word in start for word in WRITTEN_BY_RECORDERS)
    return known and start.lstrip().startswith(b"{")


def _is_pickle(start: bytes) -> bool:
    return len(start) > 2 and start[0] == 0x80 and start[1] in (2, 3, 4, 5)


def read_dump(path: Path, start: bytes) -> dict[str, Any] | None:
    """Return the dump as plain containers, or None if it is truncated or not a dump."""
    if path.stat().st_size > LARGEST:
        raise UsageError(f"{path} is a dump of more than {LARGEST >> 20} MB.")
    content = path.read_bytes()
    try:
        if _is_pickle(start):
            value = PlainUnpickler(io.BytesIO(content)).load()
        else:
            value = json.loads(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", fix=error.fix) from error
    except Exception:  # unpickling damaged bytes can raise almost anything
        return None
    return value if isinstance(value, dict) else None


def entries(dump: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = dump.get("entries")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def elastic_error(dump: Mapping[str, Any]) -> str | None:
    message = dump.get("message")
    if not isinstance(message, dict) or not isinstance(extra := message.get("extraInfo"), dict):
        return None
    return str(extra.get("py_callstack", message.get("message", "")))
