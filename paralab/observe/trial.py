"""A trial: after the given number of optimizer steps, every rank waits until all of them are done.
Existing files are not overwritten."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import torch

from paralab.observe.rank import Rank

WAIT_SECONDS = 0.1


def hold(rank: Rank, made: int) -> None:
    """Wait before a step beyond the limit. When all ranks wait or have ended, the watcher lets them
    exit with code 0."""
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
    """Redirect saves over an existing checkpoint to our folder, and load them from there."""
    moved: dict[str | None, str] = {}
    save, load = torch.serialization.save, torch.serialization.load

    @functools.wraps(save)
    def save_elsewhere(value: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else None
        if path and path not in moved and os.path.exists(path) and path not in written:
            moved[path] = str(rank.folder / f"{rank.rank}-{len(moved)}-{os.path.basename(path)}")
            rank.emit("replaced", what=f"saving over {path}", by=moved[path])
        if path and path not in moved:
            written.add(path)
        return save(value, moved.get(path, f), *args, **kwargs)

    @functools.wraps(load)
    def load_from_there(f: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else None
        return load(moved.get(path, f), *args, **kwargs)

    written: set[str] = set()
    for owner in (torch, torch.serialization):
        setattr(owner, "save", save_elsewhere)  # noqa: B010  (torch's signature is narrower)
        setattr(owner, "load", load_from_there)  # noqa: B010
