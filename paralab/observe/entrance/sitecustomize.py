"""The way into the processes of a foreign command: Python imports a module of this name before it
starts a program.

This folder stands first on PYTHONPATH of the command that `paralab doctor` starts. The one thing
done here is to wait until the program has imported torch, and then to begin observing. It takes
itself off the path, and the `sitecustomize` that would have been found without it is run as ever. A
process that never imports torch, and torchrun's own, goes on as if nothing had been here.
"""

import contextlib
import importlib.util
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))
# Programs that start or serve ranks and import torch themselves; by the name of a script or of a
# module after -m.
LAUNCHERS = {
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torchfrtrace",
    "tensorboard",
    "pip",
    "paralab",
}


def chain() -> None:
    """Run the sitecustomize that this one hides."""
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
    """Import paralab.observe without paralab's own face, which would bring packages that a rank
    need not have."""
    face = sys.modules.get("paralab")
    try:
        if face is None:
            stand_in = types.ModuleType("paralab")
            stand_in.__path__ = [PACKAGE]
            sys.modules["paralab"] = stand_in
        importlib.import_module("paralab.observe.begin").begin(os.environ["PARALAB_OBSERVE"])
    except Exception as error:
        with (
            contextlib.suppress(OSError),
            open(
                os.path.join(os.environ["PARALAB_OBSERVE"], f"off-{os.getpid()}.txt"), "w"
            ) as note,
        ):
            note.write(f"{type(error).__name__}: {error}\n")
    finally:
        if face is None:
            sys.modules.pop("paralab", None)


class AfterTorch:
    """A finder that lets the others find torch, and adds one call to the end of its loading."""

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
