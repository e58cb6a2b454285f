"""The live view shows the events' numbers and fits its terminal; without a terminal, it prints
plain lines."""

import fcntl
import json
import os
import pty
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paralab.analyse.metrics import metrics_of
from paralab.analyse.recording import Recording
from paralab.plan.plan import Plan
from paralab.record.folder import RunFolder
from paralab.show.follow import Follower
from paralab.show.live import LiveView, frame, sparkline
from tests.conftest import DEADLINE_SECONDS, ROOT

RECORDED = Path(__file__).parent.parent / "runs" / "ddp"
GiB = 2**30


def span(event, step, start_ms, end_ms, **fields):
    """Create a span. Each step takes 100 ms, and times are relative to the step."""
    at = step / 10
    return {
        "event": event,
        "step": step,
        "start": at + start_ms / 1e3,
        "end": at + end_ms / 1e3,
        **fields,
    }


def step_events(step, device):
    """Create the events of a step: 10 ms of data loading, then 80 ms with 60 ms of passes and two
    all-reduces that cover 20 ms in total.

    data     ├──┤
    passes        ├───────────────────┤
    reduce 0                    ├──┤
    reduce 1                      ├───┤
             0    10            50 55 60 70     90
    """
    return [
        span("data", step, 0, 10),
        span("forward", step, 10, 40, device=device, accumulation=0),
        span("backward", step, 40, 70, device=device, accumulation=0),
        span("all_reduce", step, 50, 60, bucket=0, bytes=10),
        span("all_reduce", step, 55, 70, bucket=1, bytes=10),
        span(
            "step",
            step,
            10,
            90,
            samples=16,
            loss=2.0 - 0.1 * step,
            skipped=False,
            all_reduces=2,
            bytes=20,
        ),
    ]


def load_event(cpu_share, rss_bytes, **gpu):
    return {
        "event": "load",
        "time": 0.5,
        "cpu_share": cpu_share,
        "rss_bytes": rss_bytes,
        "devices": [gpu] if gpu else [],
    }


@pytest.fixture
def follow(tmp_path):
    """Follow the recorded run's plan with the given events for each rank, as during a run."""
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    manifest = json.loads((RECORDED / "manifest.json").read_text())
    manifest["machine"]["gpus"] = [
        {"name": "a GPU", "memory_bytes": 10 * GiB, "capability": [9, 0]}
    ]

    def feed(*ranks, devices=(("cpu:0",), ("cpu:1",))):
        plan = manifest["plan"] | {"num_steps": 40, "find_unused": False}
        for rank, names in zip(plan["ranks"], devices, strict=True):
            rank["devices"] = [rank["devices"][0] | {"name": name} for name in names]
        (folder / "manifest.json").write_text(json.dumps(manifest))
        follower = Follower(Plan.from_json(plan), RunFolder(folder))
        for rank, events in enumerate(ranks):
            (folder / "events" / f"rank{rank}.jsonl").write_text(
                "".join(json.dumps(event) + "\n" for event in events)
            )
        follower.poll()
        return follower

    return feed


def drawn(follower, width):
    console = Console(width=width, record=True, file=StringIO(), force_terminal=True, no_color=True)
    console.print(frame(follower, 1.5, width))
    return console.export_text()


def ten_steps(device):
    return [event for step in range(10) for event in step_events(step, device)]


def test_numbers_match_the_events(follow):
    follower = follow(ten_steps("cpu:0"), ten_steps("cpu:1"))
    assert follower.done == 10
    assert follower.losses[-1] == pytest.approx(2 * 1.1)  # the sum of the ranks' parts
    assert follower.samples_per_second == pytest.approx(10 * 32 / (0.99 - 0.01))
    assert follower.seconds_left == pytest.approx(30 * 0.1)
    for rank in follower.ranks:
        assert rank.step_seconds == pytest.approx(0.08)
        assert rank.data_seconds == pytest.approx(0.01)
        share = follower.communication_share(rank.plan.rank)
        assert share == pytest.approx(20 / 80)  # 10 + 15, with 5 of overlap
        assert rank.samples == 160
        [device] = rank.devices
        assert rank.load_of(device) == (pytest.approx(60 / 80), "busy")


def test_the_rate_counts_the_samples_of_a_smaller_batch(follow):
    """The view once assumed full batches, so a run with small epochs looked faster than it was."""
    small = [
        event | {"samples": 4} if event["event"] == "step" else event
        for event in ten_steps("cpu:0")
    ]
    follower = follow(small, ten_steps("cpu:1"))
    assert follower.samples_per_second == pytest.approx(10 * (4 + 16) / (0.99 - 0.01))


@pytest.mark.parametrize("name", ["straggler", "ddp", "dp"])
def test_communication_is_the_same_as_in_the_summary(name):
    """The live view showed 51% where the summary says 6%: it counted waiting for a slower rank."""
    folder = RECORDED.parent / name
    recording = Recording.read(folder)
    follower = Follower(recording.plan, RunFolder(folder))
    follower.poll()
    ranks = range(recording.world_size)
    live = [follower.communication_share(rank) for rank in ranks]
    summary = metrics_of(recording).communication_share
    assert statistics.mean(live) == pytest.approx(summary, abs=0.05)


@pytest.mark.parametrize("width", [120, 90, 70, 60])
def test_the_frame_shows_the_numbers_at_every_width(follow, width):
    text = drawn(follow(ten_steps("cpu:0"), ten_steps("cpu:1")), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert "step 10/40 · 1.5 s elapsed · 3 s left" in text
    assert "loss 2.2000 · 327 samples/s █▇▆▆▅▄▃▃▂▁" in text
    rows = [line.split() for line in lines[-2:]]
    for number, row in enumerate(rows):
        assert row[:2] == [str(number), f"cpu:{number}"]
        assert "75%" in row  # busy
        samples = ["160"] if width > 60 else []
        assert " ".join(row).endswith(" ".join(["80", "ms", "25%", "10", "ms", *samples]))


def test_load_events_are_preferred_to_busy_shares(follow):
    follower = follow(
        [*ten_steps("cpu:0"), load_event(0.97, 3 * GiB)],
        [*ten_steps("cpu:1"), load_event(0.5, GiB)],
    )
    assert [rank.mean_load for rank in follower.ranks] == [0.97, 0.5]
    text = drawn(follower, 120)
    assert "CPU load" in text
    assert "████████████  97%" in text
    assert "██████░░░░░░  50%" in text
    assert "3.0 GiB of 23.5 GiB" in text
    assert "1.5 of 2 cores" in text


def test_a_gpu_has_its_own_load_and_memory(follow):
    gpu = {
        "device": "cuda:0",
        "allocated_bytes": 5 * GiB,
        "utilization": 0.83,
        "used_bytes": 6 * GiB,
    }
    unknown = {"device": "cuda:0", "allocated_bytes": GiB, "utilization": None, "used_bytes": None}
    ranks = [[*ten_steps("cuda:0"), load_event(0.9, GiB, **entry)] for entry in (gpu, unknown)]
    follower = follow(*ranks, devices=(("cuda:0",), ("cuda:0",)))
    first, second = follower.ranks
    assert first.load_of("cuda:0") == (0.83, "GPU load")
    assert first.memory_of("cuda:0") == (5 * GiB, 10 * GiB, "memory")
    assert second.load_of("cuda:0") == (pytest.approx(0.75), "busy")  # unknown to the driver
    assert "██████░░░░░░ 5.0 GiB of 10.0 GiB" in drawn(follower, 120)


def test_devices_that_share_a_process_have_separate_loads(follow):
    """The process load cannot be divided between its devices, but the passes can."""
    events = [event for event in ten_steps("cpu:0") if event["event"] != "backward"]
    events += step_events(10, "cpu:2")
    load = load_event(1.7, GiB)
    follower = follow(
        [*events, load], [*ten_steps("cpu:1"), load], devices=(("cpu:0", "cpu:2"), ("cpu:1",))
    )
    rank = follower.ranks[0]
    assert rank.load_of("cpu:0") == (pytest.approx(10 * 30 / (11 * 80)), "busy")
    assert rank.load_of("cpu:2") == (pytest.approx(60 / (11 * 80)), "busy")
    assert rank.memory_of("cpu:2") is None


def test_data_parallel_load_counts_replicas_not_the_thread_that_waits(follow):
    replica = [span("replica_forward", 0, 20, 28, device="cpu:0", replica=0)]
    follower = follow([*replica, *step_events(0, "cpu:0")], step_events(0, "cpu:1"))
    assert follower.ranks[0].load_of("cpu:0") == (pytest.approx(8 / 80), "busy")


def test_before_the_first_step_all_numbers_are_unknown(follow):
    follower = follow([], [])
    text = drawn(follower, 120)
    assert "waiting for the first step" in text
    assert "0%" not in text
    assert follower.seconds_left is None
    assert follower.samples_per_second is None


def test_follows_growing_files_and_counts_steps_that_all_ranks_finished(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    lines = {
        path: path.read_text().splitlines(keepends=True) for path in (folder / "events").iterdir()
    }
    for path in lines:
        path.write_text("")
    plan = json.loads((folder / "manifest.json").read_text())["plan"] | {"find_unused": False}
    follower = Follower(Plan.from_json(plan), RunFolder(folder))
    assert follower.poll() == []
    first, second = sorted(lines)
    first.write_text("".join(lines[first]))
    assert [event["rank"] for event in follower.poll()] == [0]
    assert follower.done == 0
    second.write_text("".join(lines[second])[:-300])  # ends within a line
    assert [event["rank"] for event in follower.poll()] == [1]
    assert follower.all_started
    assert follower.done == 5
    second.write_text("".join(lines[second]))
    follower.poll()
    assert follower.done == 6
    [memory] = [rank.memory_of("cpu:1") for rank in follower.ranks[1:]]
    assert memory.measure == "peak memory"


def test_the_terminal_is_restored_and_the_last_frame_stays(follow):
    written = StringIO()
    console = Console(width=100, file=written, force_terminal=True, no_color=True)
    view = LiveView(follow(ten_steps("cpu:0"), ten_steps("cpu:1")), console)
    for _ in range(50):  # only a few of these updates redraw
        view.update()
    view.stop()
    text = written.getvalue()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hide) == text.count(show) == 1
    assert text.rindex(show) > text.rindex("step 10/40")
    assert text.count("step 10/40") <= 3


@pytest.mark.processes
def test_ctrl_c_in_a_real_terminal_ends_the_ranks_and_restores_the_cursor(tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    command = [
        sys.executable,
        "-m",
        "paralab",
        "run",
        "ddp",
        "--workload",
        "mlp:tiny",
        "--steps",
        "100000",
        "--live",
        "--out",
        "run",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    text, interrupted = b"", False
    with suppress(OSError):  # the terminal closed
        while piece := os.read(master, 65536):
            text += piece
            if not interrupted and b"samples/s" in text:
                process.send_signal(signal.SIGINT)
                interrupted = True
    os.close(master)
    assert process.wait(DEADLINE_SECONDS) == 130
    after = text.decode().rpartition("\x1b[?25h")[2]  # the text after the cursor is visible again
    assert "Stopped by Ctrl-C" in after
    assert "\x1b[?25l" not in after
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


def test_sparkline():
    assert sparkline([4, 3, 2, 1], 4) == "█▆▃▁"
    assert sparkline([9, 7, 1, 3], 2) == "█▁"
    assert sparkline([1, float("nan"), 2], 3) == "▁ █"
    assert sparkline([5, 5], 8) == "▁▁"
    assert sparkline([], 8) == sparkline([float("nan")], 8) == ""


def test_without_a_terminal_prints_lines_with_load_and_communication(paralab, tmp_path):
    done = paralab(
        "run", "ddp", "--workload", "mlp:tiny", "--steps", "20", "--live", "--out", "run"
    )
    assert done.code == 0, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("step 20/20  loss ")
    for rank in (0, 1):
        part = last.partition(f"rank {rank}: load ")[2]
        load, _, rest = part.partition("%, communication ")
        assert int(load) >= 0
        assert 0 < int(rest.partition("%")[0]) <= 100
    assert "\x1b" not in done.err
    assert (tmp_path / "run" / "trace.json").exists()
    assert "step time" in done.out


def test_live_and_json_exclude_each_other(paralab, tmp_path):
    done = paralab("run", "ddp", "--live", "--json")
    assert done.code == 2
    assert "--live" in json.loads(done.out)["error"]
    assert not (tmp_path / "runs").exists()
