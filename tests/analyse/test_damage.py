"""In a damaged event file, only damaged lines are lost. `show` says how many, and result.json has
the numbers."""

import json
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from paralab.analyse.compare import comparison_of
from paralab.analyse.recording import Recording
from paralab.analyse.result import result_of
from paralab.cli.main import main

RUNS = sorted(
    path
    for path in Path(__file__).parent.parent.joinpath("runs").iterdir()
    if (path / "events").exists()
)
SIZE = 30
BYTES = {
    "random": lambda dice: dice.randbytes(SIZE),
    "zeros": lambda dice: bytes(SIZE),
    "letters": lambda dice: bytes(dice.choices(b'abc019.,:"{}[]\n ', k=SIZE)),
}


def show(folder):
    done = CliRunner().invoke(main, ["show", str(folder), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def copied(run, tmp_path):
    """A run as `paralab run` leaves it. A killed run has no result."""
    folder = tmp_path / run.name
    shutil.copytree(run, folder)
    result = result_of(folder)
    (folder / "result.json").write_text(json.dumps(result.to_dict()))
    return folder, result


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_thirty_damaged_bytes_anywhere_do_not_hide_the_run(run, tmp_path):
    folder, result = copied(run, tmp_path)
    dice = random.Random(run.name)
    for path in sorted((folder / "events").iterdir()):
        whole = path.read_bytes()
        for kind in BYTES:
            at = dice.randrange(len(whole) - SIZE)
            path.write_bytes(whole[:at] + BYTES[kind](dice) + whole[at + SIZE :])
            assert sum(Recording.read(folder).damaged.values()) <= SIZE
            found = result_of(folder)
            assert [found[key] for key in ("steps", "losses", "status")] == [
                result[key] for key in ("steps", "losses", "status")
            ]
            shown = show(folder)
            assert bool(shown["sections"][0]["blocks"][0]["rows"]) == bool(result["steps"]), (
                path.name,
                kind,
                at,
            )
        path.write_bytes(whole)


def test_a_lost_line_is_counted_and_the_rest_is_used(tmp_path):
    """Without result.json, only the step with the lost line is lost."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS[0].parent / "ddp", folder)
    before = result_of(folder)
    path = folder / "events" / "rank1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"event":"step","step":5' in line)
    lines[place] = b"\0\xff" + lines[place][2:]
    path.write_bytes(b"".join(lines))
    recording = Recording.read(folder)
    assert recording.damaged == {1: 1}
    assert len(recording.steps) == before["steps"] - 1
    told = [finding["text"] for finding in show(folder)["findings"] if finding["kind"] == "warning"]
    assert any("1 line in rank 1" in text for text in told), told


def test_a_missing_file_is_made_good_by_the_result(tmp_path):
    folder, result = copied(RUNS[0].parent / "ddp", tmp_path)
    (folder / "events" / "rank1.jsonl").unlink()
    assert result_of(folder)["steps"] == result["steps"]
    rows = show(folder)["sections"][0]["blocks"][0]["rows"]
    assert rows[0][2]["value"] == pytest.approx(result["step_seconds"]["median"])
    report = CliRunner().invoke(
        main, ["show", str(folder), "--all", "--report", str(tmp_path / "page.html")]
    )
    assert report.exit_code == 0, report.output


def test_a_comparison_leaves_out_a_round_that_one_configuration_lost(tmp_path):
    """`show` once stopped with "zip() argument 2 is shorter than argument 1"."""
    folder = tmp_path / "compared"
    shutil.copytree(RUNS[0].parent / "low_precision", folder)
    shutil.rmtree(folder / "01_single---bf16" / "round2" / "events")
    found = comparison_of(folder)
    assert found.rounds == 2
    assert [[Path(run).name for run in row.runs] for row in found.rows] == [
        ["round1", "round3"]
    ] * 2


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1]",
        b'{"event":7}',
        b'{"event":"step","step":"three","start":1.0,"end":2.0,"loss":1.0,"samples":4}',
        b'{"event":"step","step":3,"start":2.0,"end":1.0,"loss":1.0,"samples":4}',
        b'{"event":"step","step":3,"start":1.0,"end":2.0,"loss":1.0}',
        b'{"event":"step","step":3,"start":1.0{"event":"step","step":4}',
        b'{"event":"all_reduce","step":3,"start":1.0,"end":2.0,"bytes":4}',
        b"[" * 100_000,
    ],
    ids=range(9),
)
def test_a_line_that_cannot_be_costs_only_itself(tmp_path, line):
    folder = tmp_path / "run"
    shutil.copytree(RUNS[0].parent / "ddp", folder)
    before = result_of(folder)
    path = folder / "events" / "rank0.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    recording = Recording.read(folder)
    assert (recording.damaged, len(recording.steps)) == ({0: 1}, before["steps"])


def test_an_edited_run_without_time_is_reported_without_a_traceback(tmp_path):
    """Steps of zero length once made the command divide by zero."""
    folder = tmp_path / "run"
    shutil.copytree(next(run for run in RUNS if run.name == "ddp"), folder)
    for path in (folder / "events").iterdir():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        still = [event | {"start": 0, "end": 0} if "start" in event else event for event in events]
        path.write_text("".join(json.dumps(event) + "\n" for event in still))
    done = CliRunner().invoke(main, ["show", str(folder)])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
