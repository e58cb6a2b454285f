"""The result of `verify` on a page and in the terminal."""

import json

from paralab.analyse.judge import judge
from paralab.analyse.verify import Verified, VerifyOptions, VerifyResult
from paralab.record.events import Verify
from paralab.show import verify
from tests.analyse.test_verify import EQUAL


def verified(schedule, partial):
    options = VerifyOptions(
        workload="mlp:tiny",
        batch_size=8,
        partial_last_batch=partial,
        varying_weights=False,
        schedule=schedule,
    )
    proof = judge("fp64", [Verify(**EQUAL)] * 2)
    return Verified.like(proof, strategy="pipeline", options=options, arithmetic="8 = 2 × 4")


def made_up():
    configurations = [verified(s, p) for s in (None, "gpipe") for p in (False, True)]
    return VerifyResult(
        strategy="pipeline",
        workloads=["mlp:tiny"],
        precision="fp64",
        passed=True,
        steps=4,
        configurations=configurations,
        skipped=[],
        dropout="none",
        state={},
        seconds=1.0,
        run_folder="runs/v",
    )


def test_rows_that_differ_look_different(tmp_path):
    """The page once showed neither the schedule nor the last batch, so four rows looked the
    same."""
    (tmp_path / "result.json").write_text(json.dumps(made_up().to_dict()))
    [table] = verify.document_of(tmp_path).sections[0].blocks
    assert len({tuple(cell.text for cell in row) for row in table.rows}) == 4


def test_the_terminal_omits_columns_that_repeat_others(capsys):
    verify.print_verify(made_up())
    header = next(line for line in capsys.readouterr().out.splitlines() if "strategy" in line)
    assert header.split() == ["strategy", "batch", "last", "batch", "difference", "outcome"]
