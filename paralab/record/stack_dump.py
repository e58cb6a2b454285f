"""Dump each thread's stack and this process's last collectives when the launcher requests it."""

import json
import linecache
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from paralab.errors import ParalabError

# The flight recorder fields that a dump contains.
RECORDED = (
    "process_group collective_seq_id is_p2p p2p_seq_id profiling_name retired state input_sizes"
).split()


def dump_stacks(path: Path) -> None:
    """Write all stacks and the last collectives to `path`.json."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        names.get(ident, str(ident)): [
            {
                "file": f.filename,
                "line": f.lineno,
                "function": f.name,
                "code": linecache.getline(f.filename, f.lineno or 0).strip(),
            }
            for f in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"stacks": stacks, "collectives": _collectives()}))
    part.rename(path.with_suffix(".json"))


def _collectives() -> list[dict[str, Any]]:
    """Return the last entries in torch's Flight Recorder, which also records gloo, and those of our
    own backend. The torch function is private, so it may change or disappear."""
    # Do not import these modules here, because commands that only read runs import this package.
    local = getattr(sys.modules.get("paralab.collectives.recorder"), "entries", ())
    try:
        torch: Any = sys.modules["torch"]
        dump = torch._C._distributed_c10d._dump_fr_trace_json
        entries = json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]
    except Exception:
        entries = []
    return [{name: entry.get(name) for name in RECORDED} for entry in [*entries[-50:], *local]]


def write_error(path: Path, error: BaseException) -> None:
    """Write the error for the launcher, in case neither the events nor the log can be written."""
    with suppress(OSError):
        text = str(error) if isinstance(error, ParalabError) else f"{type(error).__name__}: {error}"
        path.with_suffix(".error").write_text(text)


def read_errors(folder: Path, ranks: list[int]) -> dict[int, str]:
    paths = {rank: folder / f"rank{rank}.error" for rank in ranks}
    return {rank: path.read_text(errors="replace") for rank, path in paths.items() if path.exists()}
