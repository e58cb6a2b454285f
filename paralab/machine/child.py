"""Start a paralab module in a new Python process that runs exactly this package.

`python -m paralab.worker` would put the current folder first on sys.path, and a torch.py or
random.py in that folder would hide the real module. So the command is

    python -P …/paralab/machine/child.py paralab.worker ARGUMENTS

With -P, Python does not add the current folder to the path. This file loads the package from its
own location, so paralab does not have to be installed. `paralab.workload.load` adds the user's
folder to the path when it loads the workload.
"""

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a paralab module in a new process."""
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
        sys.path.append(beside)  # for child processes; last, so it hides no other module
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
