"""Python processes of our own: they run this very package, and nothing from the folder they are
started in.

`python -m paralab.worker` would put the current folder first on sys.path. A torch.py or random.py
there would then run instead of the real one. So a child process is started as

    python -P …/paralab/machine/child.py paralab.worker ARGUMENTS

-P keeps the folder away. This file then loads the package from where it lies itself, so that
paralab need not be installed. The user's folder is added where their workload is loaded
(`paralab.workload.load`).
"""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """The words that start a module of paralab in another process."""
    return [sys.executable, "-P", os.path.abspath(__file__), module, *arguments]


def _run() -> None:
    import importlib.util
    import runpy

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("paralab", os.path.join(package, "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["paralab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["paralab"])
    if (beside := os.path.dirname(package)) not in sys.path:
        sys.path.append(
            beside
        )  # for processes that this one spawns itself; last, so that it hides nothing
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
