"""paralab: a laboratory for parallel training in PyTorch.

import paralab
result = paralab.run("mlp", "ddp", replicas=2, steps=20)     # what `paralab run --json` prints
proof = paralab.verify("gpt:tiny", "ddp", replicas=3)        # what `paralab verify --json` prints
table = paralab.compare("gpt", ["single", "ddp"])            # what `paralab compare --json` prints; table["report"] is a page
"""

from paralab.api import compare, run, verify
from paralab.errors import Interrupted, ParalabError, RunFailed, UsageError
from paralab.workload.workload import Workload

__version__ = "0.1.0"
__all__ = ["Interrupted", "ParalabError", "RunFailed", "UsageError", "Workload", "compare", "run", "verify"]
