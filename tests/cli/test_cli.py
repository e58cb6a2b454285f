"""The command line prints one JSON object and clear errors, and starts nothing for a wrong
request."""

import json

import pytest

from tests.conftest import run_paralab

pytestmark = pytest.mark.processes

RESULT_FIELDS = {
    "strategy",
    "grid",
    "ranks",
    "batch",
    "losses",
    "step_seconds",
    "total_seconds",
    "samples_per_second",
    "peak_bytes",
    "all_reduces_per_step",
    "bytes_per_step",
    "run_folder",
    "warnings",
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Run once for several tests."""
    folder = tmp_path_factory.mktemp("hybrid")
    options = [
        "--workload",
        "gpt:tiny",
        "--micro-batches",
        "3",
        "--accumulate",
        "2",
        "--steps",
        "8",
        "--save-weights",
    ]
    return folder, run_paralab("run", "hybrid", *options, "--json", cwd=folder).json


def test_json_has_the_documented_fields(hybrid):
    _, result = hybrid
    assert result.keys() >= RESULT_FIELDS
    grid = result["grid"]
    assert (grid["replicas"], grid["stages"], grid["shards"]) == (2, 2, 1)
    assert grid["devices"] == ["cpu:0", "cpu:2", "cpu:1", "cpu:3"]
    assert [(axis["name"], axis["groups"]) for axis in grid["axes"]] == [("replicas", [[0, 1]])]
    assert [rank["devices"] for rank in result["ranks"]] == [["cpu:0", "cpu:2"], ["cpu:1", "cpu:3"]]
    assert len({rank["pid"] for rank in result["ranks"]}) == 2
    assert all(rank["virtual"] and rank["local_rank"] == rank["rank"] for rank in result["ranks"])
    assert len(result["losses"]) == 8
    assert result["losses"][-1] < result["losses"][0]
    assert (
        result["all_reduces_per_step"] == 2
    )  # one per stage, for any number of micro-batches and accumulation steps
    assert {(memory["rank"], memory["device"]) for memory in result["peak_bytes"]} == {
        (0, "cpu:0"),
        (0, "cpu:2"),
        (1, "cpu:1"),
        (1, "cpu:3"),
    }
    errors = [memory["estimate_error"] for memory in result["peak_bytes"]]
    assert errors == pytest.approx([0.0] * 4, abs=0.01)


def test_the_run_folder_contains_result_weights_manifest_and_events(hybrid):
    folder, result = hybrid
    run = folder / result["run_folder"]
    assert json.loads((run / "result.json").read_text()) == result
    assert (run / "weights.pt").exists()
    manifest = json.loads((run / "manifest.json").read_text())
    assert any("parameters" in line for line in manifest["constraints"])
    assert "standard library" in manifest["data_path"] or "python" in manifest["data_path"]
    events = [
        json.loads(line) for line in (run / "events" / "rank0.jsonl").read_text().splitlines()
    ]
    one = [event for event in events if event.get("step") == 4]
    # 2 accumulation steps × 3 micro-batches × 2 stages, forward and backward
    assert sum(event["event"] == "forward" for event in one) == 12
    assert sum(event["event"] == "backward" for event in one) == 12
    reduced = [event for event in one if event["event"] == "all_reduce"]
    assert sorted(event["stage"] for event in reduced) == [0, 1]
    last = max(
        event["start"] for event in one if event["event"] == "backward" and event["stage"] == 1
    )
    assert all(event["start"] >= last for event in reduced), (
        "synchronized before the last micro-batch"
    )
    assert {"start", "split", "data", "optimizer", "step", "memory", "end"} <= {
        event["event"] for event in events
    }


def test_a_run_in_the_terminal(paralab):
    done = paralab(
        "run",
        "dp",
        "--replicas",
        "3",
        "--batch-size",
        "64",
        "--workload",
        "mlp:small",
        "--steps",
        "3",
        "--show",
        "splits",
    )
    assert done.code == 0, done.err
    for shape, device in (("[22, 256]", "cpu:0"), ("[22, 256]", "cpu:1"), ("[20, 256]", "cpu:2")):
        assert (
            f"Inside model on device {device} (virtual: cpu), shape: torch.Size({shape})"
            in done.out
        )
    for words in (
        "64 = 22 + 22 + 20 samples on 3 replicas",
        "step time",
        "samples/s",
        "run folder",
        "DataParallel is emulated",
    ):
        assert words in done.out
    assert "step 3/3  loss" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "dpp"], ["'dp'", "single, dp, ddp"]),
        (["run", "ddp", "--workload", "mpl"], ["'mlp'"]),
        (["run", "ddp", "--batch-size", "4", "--replicas", "9"], ["4", "--batch-size 9"]),
        (["run", "pipeline", "--stages", "40"], ["13 parts", "--stages 13"]),
        (["run", "single", "--device", "cuda"], ["--device cuda", "--device cpu"]),
        (["plan", "pipeline", "--micro-batches", "99"], ["64 < 99", "--micro-batches 64"]),
        (["verify", "dpp"], ["'dp'"]),
        (["verify", "pipeline", "--micro-batches", "99"], ["< 99", "--batch-size"]),
        (["run", "ddp", "--steps", "many"], ["--steps many", "--steps 2"]),
        (["run", "ddp", "--max-restarts", "-1"], ["--max-restarts", "-1"]),
    ],
)
def test_a_wrong_request_starts_nothing_and_exits_with_2(tmp_path, arguments, words):
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has the GPU that the request asks for")
    done = run_paralab(*arguments, cwd=tmp_path)
    assert done.code == 2
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_commands_that_start_ranks_refuse_to_run_inside_torchrun(paralab):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for command in ("plan", "verify", "compare"):
        done = paralab(command, "ddp", environment=launched)
        assert done.code == 2
        assert "rank 0 of 2" in done.err
        assert "paralab run" in done.err


def test_plan_starts_nothing_and_gives_reasons(paralab, tmp_path):
    done = paralab("plan", "hybrid", "--replicas", "2", "--stages", "2", "--workload", "gpt:tiny")
    assert done.code == 0
    for choice in ("backend", "local", "replicas", "micro-batches", "stage 1"):
        assert choice in done.out
    assert not (tmp_path / "runs").exists()


def test_plan_says_whether_it_fits(paralab):
    words = ["plan", "ddp", "--workload", "mlp:small", "--device-memory"]
    memory = paralab(*words, "20MB", "--json").json["memory"]
    fit = memory["fit"]
    assert [device["device"] for device in memory["devices"]] == ["cpu:0", "cpu:1"]
    assert (fit["bytes"], fit["fits"]) == (20_000_000, fit["needed"] <= 20_000_000)
    assert 0.9 < fit["largest_batch_bytes"] / fit["bytes"] <= 1
    staging = memory["devices"][0]["staging"]  # slots for the gradients of two ranks
    assert staging > 6 * 2**20
    assert fit["needed"] == memory["devices"][0]["peak"] + staging
    assert f"{fit['largest_batch_size']:,}" in paralab(*words, "20 MB").out
    assert paralab(*words, "10").code == 2


CANNOT_BE_TRIED = """
import os, torch, paralab

class Model(torch.nn.Linear):
    def forward(self, x):
        if type(x).__name__ == "FakeTensor" and {aborts}:
            os.abort()
        return super().forward(x) * (2 if x.sum() > 0 else 1)

def workload():
    data = torch.randn(8, 3), torch.randn(8, 2)
    loss = torch.nn.functional.mse_loss
    return paralab.Workload(model=lambda: Model(3, 2), data=data, loss=loss, batch_size=4)
"""


@pytest.mark.parametrize(("aborts", "reason"), [(True, "SIGABRT"), (False, "values")])
def test_a_trial_that_fails_does_not_break_the_plan(paralab, tmp_path, aborts, reason):
    (tmp_path / "own.py").write_text(CANNOT_BE_TRIED.format(aborts=aborts))
    words = ["--workload", "own.py:workload", "--device-memory", "1GB", "--json"]
    plan = paralab("plan", "single", *words).json
    assert plan["batch_size"] == 4
    assert (plan["memory"]["devices"], plan["memory"]["fit"]) == ([], None)
    assert reason in plan["memory"]["not_estimated"]


def test_list_and_env(paralab):
    assert {"single", "hybrid"} <= paralab("list", "--json").json["strategies"].keys()
    assert "gpt:124m" in paralab("list").out
    found = paralab("env", "--json").json
    assert found["machine"]["cores"] >= 1
    assert set(found["precisions"]) == {"fp64", "fp32", "tf32", "bf16", "fp16"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_runs_or_is_refused(paralab, precision):
    done = paralab(
        "run", "ddp", "--workload", "mlp:small", "--precision", precision, "--steps", "4", "--json"
    )
    if done.code == 2:
        assert f"--precision {precision}" in done.err
        return
    result = done.json
    assert result["precision"] == precision
    assert result["losses"][-1] < result["losses"][0]


def test_options_do_something(paralab, tmp_path):
    """Every option changes the recorded run. An option without effect fails here."""
    small = paralab(
        "run",
        "ddp",
        "--workload",
        "mlp:small",
        "--bucket-mb",
        "0.3",
        "--steps",
        "6",
        "--seed",
        "1",
        "--json",
    ).json
    shown = paralab(
        "run", "ddp", "--workload", "mlp:small", "--steps", "6", "--show", "ranks", "--out", "large"
    )
    for rank in (0, 1):
        assert f"Rank: {rank} | Local Rank: {rank} | Device: cpu:{rank} | PID:" in shown.out
    large = json.loads((tmp_path / "large" / "result.json").read_text())
    assert (
        small["all_reduces_per_step"] > large["all_reduces_per_step"] == 2
    )  # DDP's first bucket has 1 MB of the 1.5 MB
    assert small["bytes_per_step"] == large["bytes_per_step"]
    assert small["losses"] != large["losses"]
    counted = ["--epochs", "2", "--samples", "50", "--threads-per-device", "1"]
    same = paralab(
        "run", "mp", "--workload", "mlp:tiny", "--placement", "same", *counted, "--json"
    ).json
    assert same["steps"] == 4  # 32 + 18, twice
    assert same["threads_per_device"] == 1
    assert same["grid"]["devices"] == ["cpu:0"]
    assert any("cpu:0" in warning for warning in same["warnings"])


@pytest.mark.parametrize("command", [["verify", "ddp"], ["run", "ddp"]])
def test_a_negative_deadline_is_refused(paralab, command):
    done = paralab(*command, "--step-deadline", "-1")
    assert done.code == 2
    assert "--step-deadline" in done.err


ONLY_FAILS_IN_RANKS = """
import os, torch
from torch import nn
def loss(output, target):
    if "RANK" in os.environ:
        raise ValueError("this loss fails")
    return nn.functional.mse_loss(output, target)
def workload():
    data = torch.ones(64, 4), torch.ones(64, 2)
    return {"model": lambda: nn.Linear(4, 2), "data": data, "loss": loss, "batch_size": 16}
"""


def test_a_comparison_fails_if_every_configuration_does(tmp_path):
    (tmp_path / "mine.py").write_text(ONLY_FAILS_IN_RANKS)
    options = ["--workload", "mine.py:workload", "--rounds", "1", "--steps", "4", "--no-proof"]
    done = run_paralab("compare", "ddp", *options, "--json", cwd=tmp_path)
    assert done.code == 1
    assert json.loads(done.out)["rows"] == []
    [failed] = json.loads(done.out)["failed"]
    assert "this loss fails" in failed["error"]
