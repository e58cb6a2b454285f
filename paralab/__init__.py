"""paralab: a laboratory for parallel training in PyTorch.

import paralab
result = paralab.run("mlp", "ddp", replicas=2, steps=20)     # what `paralab run --json` prints
proof = paralab.verify("gpt:tiny", "ddp", replicas=3)        # what `paralab verify --json` prints
table = paralab.compare("gpt", ["single", "ddp"])            # what `paralab compare --json` prints; table["report"] is a page
"""

from typing import TYPE_CHECKING, Any

from paralab.errors import Interrupted, ParalabError, RunFailed, UsageError
from paralab.workload.workload import Workload

if TYPE_CHECKING:
    from paralab.api import compare, run, verify

__version__ = "0.1.0"
__all__ = [
    "Interrupted",
    "ParalabError",
    "RunFailed",
    "UsageError",
    "Workload",
    "compare",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    """What starts ranks is loaded when it is asked for: the ranks themselves pass through this
    file, and never ask."""
    if name not in ("compare", "run", "verify"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paralab import api

    return getattr(api, name)
