"""paralab: a laboratory for parallel training in PyTorch.

import paralab
result = paralab.run("mlp", "ddp", replicas=2, steps=20)   # as `paralab run --json` prints it
check = paralab.verify("gpt:tiny", "ddp", replicas=3)      # as `paralab verify --json` prints it
table = paralab.compare("gpt", ["single", "ddp"])          # table["report"] is the path of a page
sheet = paralab.practical(5, part=4)                       # a part of a practical, filled in
"""

from typing import TYPE_CHECKING, Any

from paralab.errors import Interrupted, ParalabError, RunFailed, UsageError
from paralab.workload.workload import Workload

if TYPE_CHECKING:
    from paralab.api import compare, practical, run, verify

__version__ = "0.1.0"
__all__ = [
    "Interrupted",
    "ParalabError",
    "RunFailed",
    "UsageError",
    "Workload",
    "compare",
    "practical",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the API on first use, because ranks also import this file but do not need the API."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paralab import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
