"""`paralab.verify` of several workloads in one launch."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT


def passed(case):
    """Whether it trains like a single device or, if it is lossy, as simulated. Never both."""
    lossy = case["strategy"] == "local-sgd" or "compress" in case["options"]
    assert (case["as_simulated"] is None) is not lossy
    return case["as_simulated"] and not case["equal"] if lossy else case["equal"]


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
