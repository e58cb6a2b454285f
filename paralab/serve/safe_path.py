"""Turn a name from a URL into a folder under the served folder, and reject everything else.

A run folder may come from someone else. Its links, or the run names in its manifest, may point to
any file on this machine. So before a page reads a folder, `open_folder` checks that every link in
it, and every run that it names, stays under the served folder.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

from paralab.errors import ParalabError, UsageError
from paralab.record.types import read_object
from paralab.units import size

SKIPPED = "checkpoints"  # no page reads checkpoints, which can have many files
# Pages read these files at once. Reading a much larger one would exhaust the memory.
READ_AT_ONCE = ("manifest.json", "outcome.json", "result.json", "failures.jsonl")
MOST_BYTES = 64 << 20


class NotServed(UsageError):
    """The name does not refer to a folder under the served folder."""


def find_folder(root: Path, name: str) -> Path:
    """Return the folder with this name. Its path may contain links that stay under `root`."""
    parts = PurePosixPath(name).parts
    if not name or "\0" in name or "\\" in name or name.startswith("/") or ".." in parts:
        raise NotServed(f"{name!r} is not the name of a folder below {root}.")
    try:
        path = (root / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise NotServed(f"There is no folder {name!r} below {root}.") from error
    if not path.is_relative_to(root.resolve()):
        raise NotServed(f"{name!r} leads out of {root}.")
    if not path.is_dir():
        raise NotServed(f"{name!r} is not a folder.")
    return root / name


def open_folder(root: Path, name: str) -> Path:
    """Return the folder after checking that everything a page reads in it is under `root`."""
    folder = find_folder(root, name)
    require_inside(root, folder)
    return folder


def require_inside(root: Path, folder: Path) -> None:
    """Reject links and runs outside `root`, anything that is not a file or a folder, and files that
    are too large to read at once."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            require_file_inside(root, Path(parent, name))
        folders[:] = [each for each in folders if each != SKIPPED]


def require_file_inside(root: Path, path: Path) -> None:
    """Apply the same rules to one file, which may be missing."""
    inside = root.resolve()
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        _require_link_inside(path, inside)
    elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NotServed(f"{path} is not a plain file.")
    if path.name in READ_AT_ONCE or path.suffix == ".md":
        _require_readable(path)
    if path.name in ("manifest.json", "outcome.json"):
        _require_runs_inside(path, inside)


def _require_readable(path: Path) -> None:
    with suppress(FileNotFoundError):  # a link to a file that is gone
        if (bytes_ := path.stat().st_size) > MOST_BYTES:
            most = size(MOST_BYTES)
            raise NotServed(f"{path} takes {size(bytes_)}, but pages read at most {most} per file.")


def _require_link_inside(link: Path, inside: Path) -> None:
    try:
        target = link.resolve()
        is_plain = not target.exists() or target.is_file() or target.is_dir()
    except (OSError, RuntimeError) as error:
        raise NotServed(f"The link {link} cannot be resolved.") from error
    if not target.is_relative_to(inside) or not is_plain:
        raise NotServed(f"The link {link} points outside {inside}.")


def _require_runs_inside(path: Path, inside: Path) -> None:
    """Check the runs that an experiment's manifest names. A damaged manifest names none."""
    try:
        configurations = read_object(path).get("configurations")
    except ParalabError:
        return
    for each in configurations if isinstance(configurations, list) else ():
        runs = each.get("runs") if isinstance(each, dict) else None
        for run in runs if isinstance(runs, list) else ():
            if not isinstance(run, str) or "\0" in run:
                raise NotServed(f"{path} lists {run!r}, which is not a valid run name.")
            if not (path.parent / run).resolve().is_relative_to(inside):
                raise NotServed(f"{path} refers to the run {run!r}, which is outside {inside}.")
