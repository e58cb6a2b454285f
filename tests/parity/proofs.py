"""`paralab.verify` of several workloads in one launch."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT


def verify(folder, workloads, strategy="all", **options):
    # Compiling takes seconds per model, and test_compile.py verifies that.
    options = {"compile": False} | options
    call = f"paralab.verify({workloads}, {strategy!r}, **{options})"
    done = subprocess.run(
        [sys.executable, "-c", f"import json, paralab; print(json.dumps({call}.to_dict()))"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
