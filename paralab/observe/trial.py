"""A trial stops after the given number of optimizer steps, where every rank waits for the other
ranks. A trial does not overwrite existing files."""

import functools
import os
import sys
import time
from typing import Any

import torch

from paralab.observe.rank import Rank

WAIT_SECONDS = 0.1


def hold(rank: Rank, made: int) -> None:
    """Wait before the first step beyond the limit. When all ranks wait or have exited, the watcher
    lets the waiting ranks exit with code 0."""
    if rank.trial_steps is None or made < rank.trial_steps:
        return
    rank.open("held", {})
    while not (rank.folder / "stop").exists():
        time.sleep(WAIT_SECONDS)
    rank.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def spare_files(rank: Rank) -> None:
    """Redirect saves that would overwrite an existing file to our folder, and load them there."""
    moved: dict[str | None, str] = {}
    written: set[str] = set()

    def save_elsewhere(save: Any, value: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path(f)
        if path and path not in moved and os.path.exists(path) and path not in written:
            moved[path] = str(rank.folder / f"{rank.rank}-{len(moved)}-{os.path.basename(path)}")
            rank.emit("replaced", what=f"saving over {path}", by=moved[path])
        if path and path not in moved:
            written.add(path)
        return save(value, moved.get(path, f), *args, **kwargs)

    def load_from_there(load: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return load(moved.get(_path(f), f), *args, **kwargs)

    replace(torch.serialization, "save", save_elsewhere, torch)
    replace(torch.serialization, "load", load_from_there, torch)


def _path(f: Any) -> str | None:
    return os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else None


def replace(owner: Any, name: str, by: Any, *also: Any) -> None:
    """Replace a function with `by`, which gets the original as its first argument. `also` lists
    other modules with the same function."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    for each in (owner, *also):
        setattr(each, name, replaced)
