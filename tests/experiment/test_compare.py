"""compare, scale, tune, and show as users run them. Several tests share one small comparison."""

import json
import os
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paralab.analyse.compare import comparison_of
from tests.conftest import DEADLINE_SECONDS, ROOT, run_paralab

pytestmark = pytest.mark.processes

SETUPS = [
    "single",
    "ddp --replicas 2",
    "ddp --replicas 3 --accumulate 2",
    "pipeline --micro-batches 2",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    done = run_paralab(
        "compare",
        *SETUPS,
        "--workload",
        "mlp:tiny",
        "--rounds",
        "3",
        "--steps",
        "9",
        "--json",
        cwd=folder,
    )
    return folder, done.json


def test_every_set_up_has_a_row_with_everything(compared):
    _, result = compared
    assert [row["name"] for row in result["rows"]] == [
        "single",
        "ddp ×2",
        "ddp ×3 · accumulate 2",
        "pipeline · 2 stages · 2 micro-batches",
    ]
    assert result["baseline"] == "single"
    for row in result["rows"]:
        assert row["verify"]["equal"], row["verify"]["cause"]
        assert row["speed_up"]["low"] <= row["speed_up"]["value"] <= row["speed_up"]["high"]
        assert len(row["round_seconds"]) == len(row["runs"]) == 3
        assert row["efficiency"] == pytest.approx(row["speed_up"]["value"] / row["devices"])
        assert row["loss_difference"] < 1e-4
        assert row["metrics"]["steps_measured"] == 6
    assert {row["metrics"]["bubble"] is not None for row in result["rows"][:3]} == {False}
    assert result["rows"][3]["metrics"]["bubble"]["ideal"] == pytest.approx(1 / 3)
    assert [row["all_reduces_per_step"] for row in result["rows"]] == [0, 1, 1, 0]
    assert {finding["kind"] for finding in result["findings"]} >= {"fastest", "cost", "same"}


def test_all_devices_are_of_one_size(compared):
    folder, result = compared
    plans = [
        json.loads((folder / result["run_folder"] / row["runs"][0] / "manifest.json").read_text())[
            "plan"
        ]
        for row in result["rows"]
    ]
    assert {plan["threads_per_device"] for plan in plans} == {1}
    assert {plan["batch_size"] for plan in plans} == {32}


def test_it_is_computed_from_the_folder_alone(compared):
    folder, result = compared
    again = comparison_of(folder / result["run_folder"])
    assert json.loads(json.dumps(again.to_dict()["rows"])) == result["rows"]


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_data(self, data):
        self.found.append(data)


def test_show_needs_no_torch_and_makes_the_same_page(compared, tmp_path):
    folder, result = compared
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be imported')")
    page = tmp_path / "again.html"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "paralab",
            "show",
            str(folder / result["run_folder"]),
            "--report",
            str(page),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "ddp ×3 · accumulate 2" in done.stdout
    assert "same:" in done.stdout
    made = (folder / result["report"]).read_text()
    assert len(made) < 1_500_000
    reader = Text()
    reader.feed(page.read_text())
    assert "Side by side" in reader.found
    for row in result["rows"]:
        assert row["name"] in reader.found


def test_every_run_of_it_is_a_run_folder(compared, tmp_path):
    folder, result = compared
    runs = [
        str(folder / result["run_folder"] / run)
        for row in result["rows"][:2]
        for run in row["runs"][:1]
    ]
    for run in runs:
        assert (Path(run) / "trace.json").exists()
        assert (Path(run) / "result.json").exists()
    document = run_paralab("show", *runs, "--json", cwd=tmp_path).json
    table = document["sections"][0]["blocks"][0]
    assert [row[0]["text"] for row in table["rows"]] == ["single", "ddp ×2"]
    alone = run_paralab("show", runs[1], "--markdown", "sheet.md", cwd=tmp_path)
    assert "collectives" in (tmp_path / "sheet.md").read_text()
    assert alone.code == 0


def test_a_set_up_that_fails_does_not_take_the_others_with_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        """
import os, torch
from torch import nn
class Fails(nn.Module):
    def forward(self, x):
        if os.environ.get("RANK") == "1" and x.shape[0] == 8:
            raise ValueError("eight samples are too few for me")
        return x
def workload():
    x = torch.randn(64, 8)
    return {"model": lambda: nn.Sequential(nn.Linear(8, 8), Fails(), nn.Linear(8, 2)), "data": (x, (x.sum(1) > 0).long()),
            "loss": nn.functional.cross_entropy, "batch_size": 32}
"""
    )
    setups = ["single", "ddp --accumulate 2", "ddp"]
    done = run_paralab(
        "compare",
        *setups,
        "--workload",
        "mine.py:workload",
        "--rounds",
        "2",
        "--steps",
        "4",
        "--json",
        cwd=tmp_path,
    )
    rows = {row["name"]: row for row in done.json["rows"]}
    [failed] = done.json["failed"]
    assert failed["name"] == "ddp ×2 · accumulate 2"
    assert "eight samples are too few" in failed["error"]
    assert rows["ddp ×2"]["verify"]["equal"]
    assert any(
        finding["kind"] == "warning" and "failed" in finding["text"]
        for finding in done.json["findings"]
    )


def test_a_proof_without_enough_memory_gets_a_smaller_batch(tmp_path):
    """In fp64, a step may need four times the memory. compare once called such a configuration
    different, and tune dropped the best one."""
    (tmp_path / "mine.py").write_text(
        """
import torch
from torch import nn
class Large(nn.Module):
    def forward(self, x):
        if x.dtype == torch.float64 and len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x
def workload():
    x = torch.randn(64, 8)
    return {"model": lambda: nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(8, 2)), "data": (x, (x.sum(1) > 0).long()),
            "loss": nn.functional.cross_entropy, "batch_size": 32}
"""
    )
    setups = ["single", "ddp", "ddp --replicas 4 --accumulate 8"]  # each pass of one sample fits
    options = ["--workload", "mine.py:workload", "--rounds", "1", "--steps", "2", "--json"]
    rows = run_paralab("compare", *setups, *options, cwd=tmp_path).json["rows"]
    assert [(row["verify"]["equal"], row["verify"]["proof_batch"]) for row in rows] == [
        (True, 4),
        (True, 4),
        (False, None),  # 4 samples cannot be split into 32 parts
    ]


def test_scale_says_where_the_missing_part_went(tmp_path):
    done = run_paralab(
        "scale",
        "ddp",
        "--replicas",
        "1,2",
        "--workload",
        "mlp:tiny",
        "--rounds",
        "2",
        "--weak",
        "--json",
        cwd=tmp_path,
    )
    result = done.json
    assert [(row["devices"], row["batch"]["size"]) for row in result["rows"]] == [(1, 32), (2, 64)]
    limits = [finding for finding in result["findings"] if finding["evidence"].get("perfect") == 2]
    assert limits
    assert set(limits[0]["evidence"]) >= {"efficiency", "lost_seconds"}


def test_tune_prints_a_command_that_runs(tmp_path):
    options = ["--workload", "mlp:small", "--trials", "8", "--steps", "9", "--bucket-view"]
    result = run_paralab("tune", "ddp", *options, "--json", cwd=tmp_path).json
    assert result["chosen"]["verify"]["equal"]
    assert result["chosen"]["speed_up"]["value"] >= 0.99 or result["best_is_default"]
    assert len(result["curve"]) >= 3
    assert all(point["exposed_seconds"] >= 0 for point in result["curve"])
    words = result["chosen"]["command"].split()
    assert words[:3] == ["paralab", "run", "ddp"]
    assert "--bucket-view" in words
    assert (
        run_paralab(*words[1:], "--steps", "3", "--json", cwd=tmp_path).json["status"]
        == "completed"
    )


def test_tune_searches_layouts_that_fit(tmp_path):
    """A replica of mlp:tiny needs 26.0 KiB for the entire batch, and with DDP 23.4 KiB for half of
    it. With less for activations, it fits. This uses gloo, because local also needs staging."""
    options = ["--workload", "mlp:tiny", "--trials", "8", "--steps", "4", "--json"]
    limits = ["--devices", "2", "--device-memory", "22KiB", "--backend", "gloo"]
    result = run_paralab("tune", *limits, *options, cwd=tmp_path).json
    pruned = {each["name"]: each["needed_bytes"] for each in result["search"]["pruned"]}
    assert {"ddp ×2", "single"} <= set(pruned)
    assert min(pruned.values()) > 22 * 1024
    measured = [result["default"], result["chosen"], *result["runners_up"]]
    assert len({each["name"] for each in measured}) >= 2
    assert not set(pruned) & {each["name"] for each in measured}
    assert all(each["verify"]["equal"] for each in measured)
    assert result["search"]["untried"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "single", "single"], ["appears twice"]),
        (["compare", "single", "dpp"], ["Did you mean 'dp'"]),
        (["compare", "single", "--device", "gpu"], ["Did you mean 'cuda'"]),
        (["compare", "ddp --replcas 2"], ["--replcas"]),
        (["scale", "single", "--replicas", "1,2"], ["single"]),
        (["scale", "ddp", "--replicas", "two"], ["two"]),
        (["tune", "sinlge"], ["Did you mean 'single'"]),
        (["tune", "hybrid", "--devices", "3"], ["3 devices"]),
        (["tune", "--device-memory", "16"], ["--device-memory 16"]),
        (["compare", "--all", "ddp"], ["--all", "ddp"]),
        (["show", "."], ["."]),
        (["compare", "ddp --bucket-mb nan"], ["--bucket-mb nan"]),
        (["compare", "single", "--steps", "0"], ["--steps 0"]),
        (["compare", "single", "--prefix", "nosuchcommand"], ["nosuchcommand"]),
        (["compare", "ddp --help"], ["--help"]),
        (["compare", 'ddp "x'], ['ddp "x']),
    ],
)
def test_a_wrong_request_starts_nothing(tmp_path, arguments, words):
    done = run_paralab(*arguments, cwd=tmp_path)
    assert done.code == 2, done.err
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("stop", "setups", "names"),
    [
        (signal.SIGINT, ["single", "ddp"], ["single", "ddp ×2"]),
        # Configurations get different names even if their labels are equal.
        (
            signal.SIGKILL,
            ["ddp --batch-size 8", "ddp", "ddp --seed 3"],
            ["--batch-size 8", "ddp ×2", "--seed 3"],
        ),
    ],
)
def test_the_whole_rounds_are_kept_however_it_is_stopped(tmp_path, stop, setups, names):
    command = [
        sys.executable,
        "-m",
        "paralab",
        "compare",
        *setups,
        "--workload",
        "mlp:tiny",
        "--rounds",
        "60",
        "--out",
        "kept",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as running:
        assert running.stderr is not None
        seen = next(line for line in running.stderr if line.startswith("round 4"))
        assert seen
        running.send_signal(stop)
        rest = running.stderr.read()
        assert running.wait(DEADLINE_SECONDS) == (130 if stop == signal.SIGINT else -signal.SIGKILL)
    if stop == signal.SIGINT:
        assert "Stopped by Ctrl-C after" in rest
        assert "paralab show kept" in rest
    document = run_paralab("show", "kept", "--json", cwd=tmp_path).json
    told = [row[0]["text"] for row in document["sections"][0]["blocks"][0]["rows"]]
    assert len(set(told)) == len(told) == len(names)
    assert all(name in text for name, text in zip(names, told, strict=True)), told


def test_a_damaged_folder_is_said_to_be(compared, tmp_path):
    folder, result = compared
    copy = tmp_path / "copy"
    shutil.copytree(folder / result["run_folder"], copy)
    (copy / result["rows"][1]["runs"][0] / "events" / "rank1.jsonl").write_text("")
    done = run_paralab("show", "copy", "--json", cwd=tmp_path)
    assert done.code in (0, 2)
    assert "Traceback" not in done.err
    json.loads(done.out)
    (copy / "manifest.json").write_text('{"kind": "compare"}')
    done = run_paralab("show", "copy", "--json", cwd=tmp_path)
    assert done.code == 2
    assert "schema version" in json.loads(done.out)["error"]
    (copy / "manifest.json").write_text('{"kind": "compare", "schema": 2}')
    done = run_paralab("show", "copy", "--json", cwd=tmp_path)
    assert done.code == 2
    assert "manifest.json" in json.loads(done.out)["error"]
