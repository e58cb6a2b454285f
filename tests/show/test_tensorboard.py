"""TensorBoard reads the numbers in the run folder, at their measurement times."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paralab.show.tensorboard import write_tensorboard
from tests.conftest import ROOT

RECORDED = Path(__file__).parent.parent / "runs" / "ddp"
LOAD = {"event": "load", "time": 2.27, "cpu_share": 0.97, "rss_bytes": 300, "devices": []}
GPU = {"device": "cuda:0", "allocated_bytes": 200, "utilization": 0.5, "used_bytes": None}


def read_back(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def recorded_events(folder, rank):
    return [
        json.loads(line)
        for line in (folder / "events" / f"rank{rank}.jsonl").read_text().splitlines()
    ]


def kept(events, name):
    return [event for event in events if event["event"] == name]


@pytest.fixture
def run(tmp_path):
    """Copy the recorded run and add load events and fp16 loss scales."""
    folder = tmp_path / "a-run"
    shutil.copytree(RECORDED, folder)
    path = folder / "events" / "rank0.jsonl"
    events = recorded_events(folder, 0)
    for event in kept(events, "optimizer"):
        event["scale"] = 65536.0 / (event["step"] + 1)
    events.insert(-2, LOAD | {"devices": [GPU]})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_tensorboard_reads_the_run_folder_numbers(run, tmp_path):
    target = write_tensorboard(run, tmp_path / "board")
    assert target == tmp_path / "board" / "a-run"
    found = read_back(target)
    assert set(found.Tags()["scalars"]) == {
        "train/loss",
        "train/step_seconds",
        "train/samples_per_second",
        "train/loss_scale",
        "communication_seconds/rank_0",
        "communication_seconds/rank_1",
        "peak_bytes/rank_0_cpu:0",
        "peak_bytes/rank_1_cpu:1",
        "load/rank_0_cpu_cores",
        "load/rank_0_cuda:0",
        "memory_bytes/rank_0",
        "memory_bytes/rank_0_cuda:0",
    }
    ranks = [recorded_events(run, rank) for rank in (0, 1)]
    steps = list(zip(*(kept(events, "step") for events in ranks), strict=True))
    started = kept(ranks[0], "start")[0]
    launched = started["unix_seconds"] - started["time"]
    ends = [max(event["end"] for event in step) for step in steps]
    begins = [min(event["start"] for event in step) for step in steps]

    losses = found.Scalars("train/loss")
    assert [point.step for point in losses] == list(range(6))
    assert [point.value for point in losses] == pytest.approx(
        [sum(event["loss"] for event in step) for step in steps]
    )
    assert [point.wall_time for point in losses] == pytest.approx(
        [launched + end for end in ends], abs=1e-5
    )
    times = [point.value for point in found.Scalars("train/step_seconds")]
    assert times == pytest.approx(
        [end - begin for begin, end in zip(begins, ends, strict=True)], rel=1e-5
    )
    rates = [point.value for point in found.Scalars("train/samples_per_second")]
    assert rates == pytest.approx(
        [32 / (end - begin) for begin, end in zip([begins[0], *ends], ends, strict=False)], rel=1e-5
    )
    scales = found.Scalars("train/loss_scale")
    assert [point.value for point in scales] == pytest.approx(
        [65536 / step for step in range(1, 7)]
    )
    for rank in (0, 1):
        reduced = [
            event["end"] - event["start"] for event in kept(ranks[rank], "all_reduce")
        ]  # one per step
        assert [
            point.value for point in found.Scalars(f"communication_seconds/rank_{rank}")
        ] == pytest.approx(reduced, rel=1e-5)
    [load] = found.Scalars("load/rank_0_cpu_cores")
    assert (load.value, load.wall_time) == (
        pytest.approx(0.97),
        pytest.approx(launched + 2.27, abs=1e-5),
    )
    assert found.Scalars("load/rank_0_cuda:0")[0].value == 0.5
    [text] = found.Tensors("plan")
    assert b"32 = 2 ranks" in text.tensor_proto.string_val[0]


def test_runs_with_the_same_name_get_separate_folders(tmp_path):
    names = [write_tensorboard(RECORDED, tmp_path).name for _ in range(3)]
    assert names == ["ddp", "ddp_2", "ddp_3"]


def test_a_run_that_was_killed_immediately_is_written(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "events")
    assert (
        read_back(write_tensorboard(tmp_path / "run", tmp_path / "board")).Tags()["scalars"] == []
    )


@pytest.mark.processes
def test_writing_needs_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from pathlib import Path; from paralab.show.tensorboard import write_tensorboard;"
        f"write_tensorboard(Path({str(RECORDED)!r}), Path({str(tmp_path)!r}));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_option_writes_logs_and_prints_the_tensorboard_command(paralab, tmp_path):
    done = paralab(
        "run",
        "single",
        "--workload",
        "mlp:tiny",
        "--steps",
        "3",
        "--out",
        "run",
        "--tensorboard",
        "board",
    )
    assert done.code == 0, done.err
    assert "tensorboard --logdir board" in done.out
    points = read_back(tmp_path / "board" / "run").Scalars("train/loss")
    assert [point.value for point in points] == pytest.approx(
        json.loads((tmp_path / "run" / "result.json").read_text())["losses"]
    )


def test_a_missing_package_is_an_error_before_the_run_starts(paralab, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'tensorboard' else find(name, *rest)\n"
    )
    done = paralab(
        "run", "single", "--tensorboard", "board", environment={"PYTHONPATH": f"{hidden}:{ROOT}"}
    )
    assert done.code == 2, done.err
    assert 'pip install "paralab[tensorboard]"' in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
def test_the_python_function_takes_it_too(tmp_path):
    import paralab

    paralab.run("mlp:tiny", "single", steps=2, out=tmp_path / "run", tensorboard=tmp_path / "board")
    assert len(read_back(tmp_path / "board" / "run").Scalars("train/loss")) == 2
