"""The fault matrix: its cases, its table, and one complete fault trial."""

import json
import subprocess
import sys

import pytest

from bench.faults.matrix import TITLES, format_line, format_markdown, list_cases, make_row
from bench.faults.outside import IN_RANKS
from bench.faults.trial import FaultCase, FaultOutcome
from paralab.errors import UsageError
from tests.conftest import ROOT

pytestmark = pytest.mark.processes


def test_every_fault_is_in_the_matrix_and_ranks_and_phases_where_they_apply():
    cases = list_cases()
    assert {case.fault for case in cases} == set(TITLES)
    kills = [(case.rank, case.phase) for case in cases if case.fault == "kill"]
    assert kills == [(rank, phase) for rank in (0, 1) for phase in ("start", "step", "save")]
    assert all(case.rank is None for case in cases if case.fault not in IN_RANKS)
    with pytest.raises(UsageError, match="'kill'"):
        list_cases(("kil",))


def test_a_fault_that_is_not_survived_shows():
    good = FaultOutcome(
        "recovered",
        named=True,
        equal=True,
        orphans=0,
        noticed_seconds=0.1,
        next_step_seconds=3.0,
        steps_lost=4,
    )
    for bad in (
        FaultOutcome("LOST", named=True, equal=None, orphans=0),
        FaultOutcome("recovered", named=False, equal=True, orphans=0),
        FaultOutcome("recovered", named=True, equal=False, orphans=0),
        FaultOutcome("recovered", named=True, equal=True, orphans=1),
    ):
        row = make_row(FaultCase("kill", 1, "step"), "SIGKILL", [good, bad])
        assert good.survived
        assert not row["survived"]
    row = make_row(FaultCase("kill", 1, "step"), "SIGKILL", [good, good])
    assert row["survived"]
    assert {"0.1", "3", "4", "2"} <= set(format_line(row).split())
    assert (
        "| SIGKILL | last rank, step | 2 | recovered | 0.1 s | 3 s | 4 | 2 of 2 | 2 of 2 | 0 |"
        in format_markdown([row])
    )


def test_one_fault_from_beginning_to_end(tmp_path):
    matrix = [sys.executable, "-m", "bench.faults.matrix"]
    options = ["--only", "launcher", "--repeat", "1", "--out", str(tmp_path / "f")]
    done = subprocess.run([*matrix, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "f" / "result.json").read_text())
    [row] = result["rows"]
    assert result["survived"]
    assert (row["outcomes"], row["equal"], row["orphans"]) == (["resumed"], 1, 0)
