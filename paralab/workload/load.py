"""Load a workload: a built-in name, `path/to/file.py:function`, or a pickle from a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paralab.errors import UsageError, unknown
from paralab.workload.catalog import full_name, look_up
from paralab.workload.randomness import seeded
from paralab.workload.reference import PICKLED, names_file, split
from paralab.workload.workload import Workload, as_workload


def load_workload(reference: str) -> Workload:
    """Build the workload with this name. Report a user's mistakes as a UsageError."""
    if reference.startswith(PICKLED):
        path = Path(reference.removeprefix(PICKLED))
        with _importing_from(Path.cwd()):
            return _build(pickle.loads(path.read_bytes()), "from the notebook", path.parent)
    if names_file(reference):
        path, _, attribute = split(reference)
        with _importing_from(path.parent, Path.cwd()):
            return _build(_import_from(path, attribute), reference, path.parent)
    entry, numbers = look_up(reference)
    built: Workload = importlib.import_module(entry.module).build(full_name(reference), **numbers)
    return built


def _build(function: Any, shown: str, folder: Path) -> Workload:
    # Random data must be the same on all ranks.
    with user_code(f"The workload {shown} failed with", folder), seeded(0):
        value = function() if callable(function) else function
    return as_workload(value, Path(shown).name)


@contextmanager
def user_code(what: str, folder: Path) -> Iterator[None]:
    """Report any exception in this context as a UsageError, with the traceback in the user's
    code."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script may parse arguments when it is imported
        detail = their_lines(error, folder)
        raise UsageError(f"{what} {type(error).__name__}: {error}", detail=detail) from error


@contextmanager
def _importing_from(*folders: Path) -> Iterator[None]:
    """Put the user's folders first on sys.path while loading, as Python does for a script. Then
    move them to the end, so that user files cannot shadow modules that torch imports later."""
    names = [str(folder.resolve()) for folder in folders]
    sys.path[:0] = names
    try:
        yield
    finally:
        for name in names:
            sys.path.remove(name)
        sys.path += [name for name in dict.fromkeys(names) if name not in sys.path]


def _import_from(path: Path, attribute: str) -> Any:
    name = f"paralab_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module here
    with user_code(f"{path.name} could not be imported:", path.parent), seeded(0):
        spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        values = vars(module).items()
        own = [key for key, value in values if getattr(value, "__module__", "") == name]
        own = own or ["(the file does not define any function)"]
        raise unknown(f"function in {path.name} named", attribute, own)
    return getattr(module, attribute)


def their_lines(error: BaseException, folder: Path) -> str:
    """Return the part of the traceback in the user's own files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_under(frame.filename, folder)]
    if isinstance(error, SyntaxError) and not own:  # a SyntaxError has no frame in the faulty file
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_list(own))


def _is_under(filename: str, folder: Path) -> bool:
    if filename.startswith("<"):  # <frozen importlib>, <string>
        return False
    path, package = Path(filename).resolve(), Path(__file__).resolve().parent.parent
    is_ours = path.is_relative_to(package) or "site-packages" in path.parts
    return path.is_relative_to(folder.resolve()) and not is_ours
