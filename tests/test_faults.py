"""The fault matrix: its cells, its table, and one trial of every kind that is done from outside."""

import json

import pytest

from paralab.disturbances import IN_RANKS, Cell, Trial
from paralab.errors import UsageError
from paralab.faults import TITLES, as_markdown, line_of, matrix, row_of
from tests.conftest import run_paralab


def test_every_fault_is_in_the_matrix_and_ranks_and_phases_where_they_apply():
    cells = matrix()
    assert {cell.fault for cell in cells} == set(TITLES)
    kills = [(cell.rank, cell.phase) for cell in cells if cell.fault == "kill"]
    assert kills == [(rank, phase) for rank in (0, 1) for phase in ("start", "step", "save")]
    assert all(cell.rank is None for cell in cells if cell.fault not in IN_RANKS)
    with pytest.raises(UsageError, match="Did you mean 'kill'"):
        matrix(("kil",))


def test_a_fault_that_is_not_survived_shows():
    good = Trial(
        "recovered",
        named=True,
        equal=True,
        orphans=0,
        noticed_seconds=0.1,
        next_step_seconds=3.0,
        steps_lost=4,
    )
    for bad in (
        Trial("LOST", named=True, equal=None, orphans=0),
        Trial("recovered", named=False, equal=True, orphans=0),
        Trial("recovered", named=True, equal=False, orphans=0),
        Trial("recovered", named=True, equal=True, orphans=1),
    ):
        row = row_of(Cell("kill", 1, "step"), "SIGKILL", [good, bad])
        assert good.survived
        assert not row["survived"]
    row = row_of(Cell("kill", 1, "step"), "SIGKILL", [good, good])
    assert row["survived"]
    assert (
        "noticed   0.1 s  next step     3 s  lost  4 steps  equal 2 of 2   cause named 2 of 2"
        in line_of(row)
    )
    assert (
        "| SIGKILL | last rank, step | 2 | recovered | 0.1 s | 3 s | 4 | 2 of 2 | 2 of 2 | 0 |"
        in as_markdown([row])
    )


def test_one_fault_from_beginning_to_end(tmp_path):
    run = ["faults", "--only", "launcher", "--repeat", "1", "--out", "f", "--json"]
    result = run_paralab(*run, cwd=tmp_path).json
    [row] = result["rows"]
    assert result["survived"]
    assert (row["outcomes"], row["equal"], row["orphans"]) == (["resumed"], 1, 0)
    assert json.loads((tmp_path / "f" / "result.json").read_text()) == result
