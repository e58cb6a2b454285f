"""Check measurements against known values: a cable's rate, an injected delay, and torch.profiler."""

import json
import os

import pytest

from bench.link import link, why_not
from paralab.analyse.recording import Recording
from paralab.analyse.time_intervals import length
from paralab.worker.measure.profile import FIRST, STEPS
from tests.conftest import run_paralab

pytestmark = pytest.mark.processes

MBIT_PER_SECOND = 400
SLOW = """
import os, time, torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            time.sleep(0.03)
        return x

def workload():
    x = torch.randn(64, 32)
    return {"model": lambda: nn.Sequential(nn.Linear(32, 32), Slow(), nn.Linear(32, 2)), "data": (x, (x.sum(1) > 0).long()),
            "loss": nn.functional.cross_entropy}
"""


def test_communication_takes_as_long_as_the_cable_needs(tmp_path):
    """Two hosts (network namespaces) exchange 25 MB per step in both directions over a 400 Mbit/s
    link."""
    reason = why_not()
    if reason and not os.environ.get("PARALAB_REQUIRE_LINK"):
        pytest.skip(reason)
    with link(MBIT_PER_SECOND) as (options, environment):
        done = run_paralab(
            *("run", "ddp", *options, "--backend", "gloo", "--steps", "6", "--json"),
            cwd=tmp_path,
            environment=environment,
        )
    result = done.json
    expected = result["bytes_per_step"] * 8 / (MBIT_PER_SECOND * 1e6)
    # No link is faster than its rate, but a busy machine adds time.
    assert 0.95 < result["metrics"]["communication_seconds"] / expected < 2
    assert result["metrics"]["keeps_rule"] is False
    assert result["metrics"]["exposed_share"] > 0.3


def test_a_planted_slow_rank_is_named(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    result = run_paralab(
        "run", "ddp", "--workload", "slow.py:workload", "--steps", "12", "--json", cwd=tmp_path
    ).json
    late = result["metrics"]["straggler"]
    assert late["rank"] == 1
    assert 0.5 * 0.03 < late["waited_seconds"] < 10 * 0.03


def test_communication_agrees_with_the_profiler(tmp_path):
    result = run_paralab(
        # torch's profiler knows gloo's collectives.
        *("run", "ddp", "--workload", "mlp", "--backend", "gloo", "--steps", "10"),
        *("--profile", "--json"),
        cwd=tmp_path,
    ).json
    recording = Recording.read(tmp_path / result["run_folder"])
    trace = json.loads((recording.folder / "profile" / "rank0.json").read_text())["traceEvents"]
    theirs = length(
        (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in trace
        if e.get("ph") == "X" and e["name"] == "gloo:all_reduce"
    )
    mine = sum(
        length(
            (s["start"], s["end"]) for s in recording.spans(0, step) if s["event"] == "all_reduce"
        )
        for step in range(FIRST, FIRST + STEPS)
    )
    # The profiler and a busy machine slow down the callback that records the end.
    assert mine == pytest.approx(theirs, rel=0.25)
