"""From a name to a `Workload`: a built-in one, `path/to/file.py:function`, or a pickled function from a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType

from paralab.errors import UsageError, unknown
from paralab.workload.catalog import full_name, look_up
from paralab.workload.randomness import seeded
from paralab.workload.reference import PICKLED, names_file, split
from paralab.workload.workload import Workload, as_workload


def load_workload(reference: str) -> Workload:
    """Build the workload that a command names; a user's mistake becomes a UsageError with their lines of the traceback."""
    if reference.startswith(PICKLED):
        path = Path(reference.removeprefix(PICKLED))
        function, shown = pickle.loads(path.read_bytes()), "from the notebook"
        folder = path.parent
    elif names_file(reference):
        path, _, attribute = split(reference)
        folder, shown = path.parent, reference
        module = _import_file(path)
        if not hasattr(module, attribute):
            names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            raise unknown(f"function in {path.name} named", attribute, names or ["(the file defines no function)"])
        function = getattr(module, attribute)
    else:
        entry, numbers = look_up(reference)
        built: Workload = importlib.import_module(entry.module).build(full_name(reference), **numbers)
        return built
    try:
        with seeded(0):  # data that is made at random here must be the same on every rank
            value = function() if callable(function) else function
    except Exception as error:
        raise UsageError(
            f"The workload {shown} failed with {type(error).__name__}: {error}", detail=their_lines(error, folder)
        ) from error
    return as_workload(value, Path(shown).name)


def _import_file(path: Path) -> ModuleType:
    """Import a user's file as a script's neighbours would see it: its folder is on sys.path."""
    sys.path.insert(0, str(path.parent))
    name = f"paralab_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling inside the user's file look the module up
    try:
        with seeded(0):
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
    if filename.startswith("<"):  # <frozen importlib>, <string>
        return False
    path, package = Path(filename).resolve(), Path(__file__).resolve().parent.parent
    return path.is_relative_to(folder.resolve()) and not path.is_relative_to(package) and "site-packages" not in path.parts
