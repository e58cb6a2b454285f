"""Start watching in the processes of a command: Python imports a module with this name before it
runs a program.

This folder comes first on the PYTHONPATH of the command that `paralab doctor` starts. This module
waits until the program imports torch, and then starts watching. It removes itself from the path and
runs the `sitecustomize` that it hides. Launchers, and processes that never import torch, are not
affected.
"""

import contextlib
import importlib.util
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))
# Programs that import torch but do not train, by the name of the script or of the module after -m.
LAUNCHERS = {
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "torchfrtrace"),
    *("tensorboard", "pip", "paralab"),
}


def chain() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def is_launcher() -> bool:
    words = sys.orig_argv[1:]
    named = words[words.index("-m") + 1 : words.index("-m") + 2] if "-m" in words else []
    script = next((word for word in words if not word.startswith("-")), "")
    return bool(
        {*named, os.path.basename(script)} & LAUNCHERS
    ) or "multiprocessing.resource_tracker" in " ".join(words)


def begin() -> None:
    """Import paralab.observe without paralab/__init__.py, which needs packages that a rank may not
    have."""
    face = sys.modules.get("paralab")
    try:
        if face is None:
            stand_in = types.ModuleType("paralab")
            stand_in.__path__ = [PACKAGE]
            sys.modules["paralab"] = stand_in
        importlib.import_module("paralab.observe.begin").begin(os.environ["PARALAB_OBSERVE"])
    except Exception as error:
        path = os.path.join(os.environ["PARALAB_OBSERVE"], f"off-{os.getpid()}.txt")
        with contextlib.suppress(OSError), open(path, "w") as note:
            note.write(f"{type(error).__name__}: {error}\n")
    finally:
        if face is None:
            sys.modules.pop("paralab", None)


class AfterTorch:
    """A finder that starts watching right after torch is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_begin(module: types.ModuleType) -> None:
            load(module)
            begin()

        spec.loader.exec_module = load_and_begin  # type: ignore[method-assign]
        return spec


chain()
if os.environ.get("PARALAB_OBSERVE") and not is_launcher():
    sys.meta_path.insert(0, AfterTorch())  # type: ignore[arg-type]
