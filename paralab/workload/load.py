"""From a name to a `Workload`: a built-in one, `path/to/file.py:function`, or a pickled function from a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from paralab.errors import UsageError, unknown
from paralab.workload.catalog import look_up
from paralab.workload.workload import Workload, as_workload

PICKLED = "pickle:"


def load_workload(reference: str) -> Workload:
    """Build the workload that a command names; a user's mistake becomes a UsageError with their lines of the traceback."""
    if reference.startswith(PICKLED):
        path = Path(reference.removeprefix(PICKLED))
        function, shown = pickle.loads(path.read_bytes()), "from the notebook"
        folder = path.parent
    elif names_file(reference):
        path, _, attribute = _split(reference)
        folder, shown = path.parent, reference
        module = _import_file(path)
        if not hasattr(module, attribute):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise unknown(f"function in {path.name} named", attribute, names or ["(the file defines no function)"])
        function = getattr(module, attribute)
    else:
        entry, numbers = look_up(reference)
        full_name = reference if ":" in reference else f"{reference}:{next(iter(entry.sizes))}"
        built: Workload = importlib.import_module(entry.module).build(full_name, **numbers)
        return built
    try:
        value = function() if callable(function) else function
    except Exception as error:
        raise UsageError(
            f"The workload {shown} failed with {type(error).__name__}: {error}", detail=their_lines(error, folder)
        ) from error
    return as_workload(value, Path(shown).name)


def names_file(reference: str) -> bool:
    """Is this `path/to/file.py:function` rather than a built-in name?"""
    return ".py" in reference or "/" in reference


def check_reference(reference: str) -> str:
    """Refuse early, without torch, what cannot be loaded; give the reference with an absolute path."""
    if reference.startswith(PICKLED):
        return reference
    if not names_file(reference):
        look_up(reference)
        return reference
    path, colon, attribute = _split(reference)
    if not path.is_file():
        raise UsageError(f"There is no file {str(path)!r}.", cure="path/to/file.py:function")
    if not colon or not attribute:
        raise UsageError(f"{reference!r} names a file but no function in it.", cure=f"{reference.rstrip(':')}:function")
    return f"{path.resolve()}:{attribute}"


def _split(reference: str) -> tuple[Path, str, str]:
    path, colon, attribute = reference.rpartition(":")
    if not colon:
        path, attribute = reference, ""
    return Path(path).expanduser(), colon, attribute


def _import_file(path: Path) -> ModuleType:
    """Import a user's file as a script's neighbours would see it: its folder is on sys.path."""
    sys.path.insert(0, str(path.parent))
    name = f"paralab_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling inside the user's file look the module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"{path.name} could not be imported: {type(error).__name__}: {error}", detail=their_lines(error, path.parent)
        ) from error
    return module


def their_lines(error: BaseException, folder: Path) -> str:
    """The traceback, trimmed to the frames of the user's own files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_under(frame.filename, folder)]
    lines = traceback.format_list(own)
    if isinstance(error, SyntaxError) and not own:  # a syntax error has no frame in the file it is about
        return "".join(traceback.format_exception_only(error))
    return "".join(lines)


def _is_under(filename: str, folder: Path) -> bool:
    inside: Any = Path(filename).resolve().is_relative_to(folder.resolve())
    package = Path(__file__).resolve().parent.parent
    return bool(inside) and not Path(filename).resolve().is_relative_to(package) and "site-packages" not in filename
