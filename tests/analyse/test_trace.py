"""The trace for Perfetto: slices nest, arrows end in slices, all ranks share a clock, and the
numbers match the events."""

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from paralab.analyse.trace import trace_of
from tests.analyse.recordings import plan, write

RECORDED = Path(__file__).parent.parent / "runs" / "ddp"


def span(event, start_ms, end_ms, **fields):
    return {"event": event, "step": 0, "start": start_ms / 1e3, "end": end_ms / 1e3, **fields}


def record(folder, ranks, devices):
    """A run folder with these events, and the recorded run's manifest with other devices."""
    (folder / "events").mkdir(parents=True)
    manifest = json.loads((RECORDED / "manifest.json").read_text())
    manifest["plan"]["ranks"] = [
        {
            "rank": rank,
            "local_rank": rank,
            "replica": rank,
            "devices": [
                {"name": name, "torch": name, "role": "", "virtual": False, "shared": False}
                for name in names
            ],
            "samples_per_step": 4,
            "split": [4] * len(names),
        }
        for rank, names in enumerate(devices)
    ]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for rank, events in enumerate(ranks):
        (folder / "events" / f"rank{rank}.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in events)
        )
    return folder


@pytest.fixture
def pipeline(tmp_path):
    """Two stages, two micro-batches; times are in milliseconds.

    cpu:0   f0 f1          b0 b1
    cpu:1      f0 f1 b0 b1
            10 12 14 16 18 20 22
    """

    def work(event, start, stage, micro):
        return span(
            event, start, start + 2, device=f"cpu:{stage}", stage=stage, micro=micro, accumulation=0
        )

    forward = [
        work("forward", 10 + 2 * (stage + micro), stage, micro)
        for stage in (0, 1)
        for micro in (0, 1)
    ]
    backward = [
        work("backward", 16 + 2 * (2 * (1 - stage) + micro), stage, micro)
        for stage in (0, 1)
        for micro in (0, 1)
    ]
    step = span("step", 10, 25, loss=0.5, samples=4)
    load = {"event": "load", "time": 0.02, "cpu_share": 0.97, "rss_bytes": 300}
    load["devices"] = [
        {"device": "cuda:0", "allocated_bytes": 200, "utilization": 0.5, "used_bytes": None}
    ]
    return record(tmp_path / "pipeline", [[*forward, *backward, load, step]], [["cpu:0", "cpu:1"]])


@pytest.fixture
def overlapping(tmp_path):
    """Two ranks, three buckets. The second one overlaps the first and the third. Rank 1 is ready a
    millisecond later.

    bucket 0  ├─────┤
    bucket 1     ├──────┤
    bucket 2         ├─────┤
              10 12 14 16 18
    """

    def rank(late):
        backward = span("backward", 9 + late, 19, device=f"cpu:{late}", accumulation=0)
        buckets = [(10, 14), (12, 17), (15, 18)]
        reduced = [
            span("all_reduce", start + late, end, bucket=n, bytes=100 * n)
            for n, (start, end) in enumerate(buckets)
        ]
        return [*reduced, backward, span("step", 9, 20, loss=0.25 + late, samples=4)]

    return record(tmp_path / "overlapping", [rank(0), rank(1)], [["cpu:0"], ["cpu:1"]])


@pytest.fixture(params=["recorded", "pipeline", "overlapping"])
def trace(request):
    return trace_of(
        RECORDED if request.param == "recorded" else request.getfixturevalue(request.param)
    )


def phase(trace, *letters):
    return [event for event in trace["traceEvents"] if event["ph"] in letters]


def slices_by_thread(trace):
    found = defaultdict(list)
    for event in phase(trace, "X"):
        found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event))
    return found


def around(trace, flow):
    """The innermost slice around an arrow's end. A viewer attaches the arrow to it."""
    on_thread = slices_by_thread(trace)[flow["pid"], flow["tid"]]
    holding = [(end - start, event) for start, end, event in on_thread if start <= flow["ts"] < end]
    assert holding, f"{flow} ends in no slice"
    return min(holding, key=lambda pair: pair[0])[1]


def arrows(trace, name):
    """The slices that each arrow of this name touches."""
    found = defaultdict(list)
    for flow in phase(trace, "s", "t", "f"):
        if flow["name"] == name:
            found[flow["id"]].append(around(trace, flow))
    return list(found.values())


def lane_names(trace):
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in phase(trace, "M")
        if e["name"] == "thread_name"
    }


def test_it_follows_the_trace_event_format(trace):
    """The part of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    that we use."""
    text = json.dumps(trace, allow_nan=False)
    assert json.loads(text) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    needed = {
        "X": {"ts", "dur", "tid"},
        "C": {"ts", "args"},
        "i": {"ts", "s", "tid"},
        "M": {"args"},
    }
    needed |= {letter: {"ts", "id", "tid", "cat"} for letter in "stf"}
    for event in trace["traceEvents"]:
        assert event.keys() >= {"ph", "name", "pid"} | needed[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("ts", 0), int)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "t") in ("g", "p", "t")
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
    assert set(slices_by_thread(trace)) <= set(lane_names(trace)), "a thread without a name"


def test_slices_of_a_thread_lie_within_or_after_one_another(trace):
    for thread, slices in slices_by_thread(trace).items():
        open_ends = []
        for start, end, event in sorted(slices, key=lambda slice_: (slice_[0], -slice_[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (
                f"{event} crosses another slice of thread {thread}"
            )
            open_ends.append(end)


def test_every_arrow_starts_once_ends_once_and_never_runs_back(trace):
    flows = defaultdict(list)
    for flow in phase(trace, "s", "t", "f"):
        flows[flow["id"]].append(flow)
    assert flows
    for parts in flows.values():
        letters = [flow["ph"] for flow in parts]
        assert letters == [
            "s",
            *["t"] * (len(parts) - 2),
            "f",
        ]  # the file is in order of time
        assert parts[-1]["bp"] == "e"
        assert [flow["ts"] for flow in parts] == sorted(flow["ts"] for flow in parts)
        assert (
            len({around(trace, flow)["cat"] for flow in parts}) == 1
        )  # from a forward to a forward, and so on


def test_every_recorded_span_is_there_at_its_time_on_the_common_clock():
    trace = trace_of(RECORDED)
    names = {e["pid"]: e["args"]["name"] for e in phase(trace, "M") if e["name"] == "process_name"}
    assert names == {1: "rank 0 · cpu:0", 2: "rank 1 · cpu:1"}
    for rank in (0, 1):
        lines = (RECORDED / "events" / f"rank{rank}.jsonl").read_text().splitlines()
        spans = [
            event for line in lines if "start" in (event := json.loads(line)) and "end" in event
        ]
        wanted = Counter(
            (e["event"], e["step"], round(e["start"] * 1e6), round((e["end"]) * 1e6)) for e in spans
        )
        own = [event for event in phase(trace, "X") if event["pid"] == rank + 1]
        assert (
            Counter((e["cat"], e["args"]["step"], e["ts"], e["ts"] + e["dur"]) for e in own)
            == wanted
        )
    # On one clock, the ranks are in the same all-reduce at the same time. Checking one step is
    # enough.
    one, other = [
        e for e in phase(trace, "X") if e["cat"] == "all_reduce" and e["args"]["step"] == 3
    ]
    assert one["pid"] != other["pid"]
    assert max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"])
    assert [len(chain) for chain in arrows(trace, "all-reduce")] == [2] * 6
    assert lane_names(trace)[one["pid"], one["tid"]] == "communication"
    assert one["args"] == {"step": 3, "bucket": 0, "bytes": 4352}
    losses = [
        event["args"]["of the batch"] for event in phase(trace, "C") if event["name"] == "loss"
    ]
    assert len(losses) == 6
    steps = [e["args"]["loss"] for e in phase(trace, "X") if e["name"] == "step 0"]
    assert losses[0] == pytest.approx(sum(steps))  # the ranks' parts
    assert sorted(e["name"] for e in phase(trace, "i")) == [
        "split [8, 16] on cpu:0",
        "split [8, 16] on cpu:1",
    ]


def test_a_micro_batch_goes_from_stage_to_stage_and_back(pipeline):
    trace = trace_of(pipeline)
    found = [
        [(e["name"], f"stage {e['args']['stage']}", f"micro {e['args']['micro']}") for e in chain]
        for chain in arrows(trace, "micro-batch")
    ]
    assert sorted(found) == [
        [("backward", "stage 1", "micro 0"), ("backward", "stage 0", "micro 0")],
        [("backward", "stage 1", "micro 1"), ("backward", "stage 0", "micro 1")],
        [("forward", "stage 0", "micro 0"), ("forward", "stage 1", "micro 0")],
        [("forward", "stage 0", "micro 1"), ("forward", "stage 1", "micro 1")],
    ]
    assert sorted(lane_names(trace).values()) == ["cpu:0", "cpu:1", "steps"]


def test_with_a_process_per_stage_it_goes_from_rank_to_rank_of_its_replica():
    folder = (
        RECORDED.parent / "hybrid"
    )  # 2 replicas × 2 stages, --schedule 1f1b: ranks 0 and 1 are a replica, and 2 and 3
    found = Counter(
        (
            chain[0]["name"],
            *((e["pid"] - 1, e["args"]["stage"]) for e in chain),
            len({e["args"]["micro"] for e in chain}),
        )
        for chain in arrows(trace_of(folder), "micro-batch")
    )
    each = 3 * 4  # steps × micro-batches
    assert found == {
        ("forward", (0, 0), (1, 1), 1): each,
        ("forward", (2, 0), (3, 1), 1): each,
        ("backward", (1, 1), (0, 0), 1): each,
        ("backward", (3, 1), (2, 0), 1): each,
    }


def test_the_half_of_a_backward_pass_for_the_weights_sends_nothing_on(tmp_path):
    def backward(rank, start, **more):
        return span(
            "backward",
            start,
            start + 1,
            device=f"cpu:{rank}",
            stage=rank,
            micro=0,
            accumulation=0,
            **more,
        )

    ranks = [
        [backward(0, 12), backward(0, 15, weights=True)],
        [backward(1, 10), backward(1, 11, weights=True)],
    ]
    folder = record(tmp_path / "zero-bubble", ranks, [["cpu:0"], ["cpu:1"]])
    manifest = json.loads((folder / "manifest.json").read_text())
    for rank in manifest["plan"]["ranks"]:
        rank["replica"] = 0
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert [
        [(e["pid"], e["ts"]) for e in chain] for chain in arrows(trace_of(folder), "micro-batch")
    ] == [[(2, 10_000), (1, 12_000)]]


def test_instants_are_on_a_lane_without_arrows():
    """Perfetto treats an instant as a slice, and would attach the arrow of the surrounding pass to
    it."""
    trace = trace_of(RECORDED.parent / "pipeline")
    assert {lane_names(trace)[e["pid"], e["tid"]] for e in phase(trace, "i")} == {"steps"}
    assert "steps" not in {
        lane_names(trace)[e["pid"], e["tid"]] for e in phase(trace, "s", "t", "f")
    }


def test_load_becomes_counters_and_the_unknown_draws_nothing(pipeline):
    counters = {e["name"]: (e["ts"], e["args"]) for e in phase(trace_of(pipeline), "C")}
    assert counters == {
        "process load": (20_000, {"in cores": 0.97}),
        "process memory": (20_000, {"in bytes": 300}),
        "load cuda:0": (20_000, {"as a share": 0.5}),
        "memory cuda:0 allocated": (20_000, {"in bytes": 200}),
        "loss": (25_000, {"of the batch": 0.5}),
    }


def test_all_reduces_that_overlap_have_their_own_lanes_and_meet_across_ranks(overlapping):
    trace = trace_of(overlapping)
    names = lane_names(trace)
    reduced = [e for e in phase(trace, "X") if e["cat"] == "all_reduce" and e["pid"] == 1]
    assert [(e["args"]["bucket"], names[1, e["tid"]]) for e in reduced] == [
        (0, "communication"),
        (1, "communication (2)"),
        (2, "communication"),
    ]
    # An arrow leads from the first rank that was ready to the last one.
    found = [
        [(e["args"]["bucket"], e["pid"]) for e in chain] for chain in arrows(trace, "all-reduce")
    ]
    assert sorted(found) == [[(0, 1), (0, 2)], [(1, 1), (1, 2)], [(2, 1), (2, 2)]]


def test_a_batch_goes_from_scatter_through_the_replicas_to_gather(tmp_path):
    def one_pass(at, number):
        replicas = [
            span("replica_forward", at + 1, at + 3 + r, device=f"cpu:{r}", replica=r)
            for r in (0, 1)
        ]
        around_all = span("forward", at, at + 6, device="cpu:0", accumulation=number)
        return [span("scatter", at, at + 1), *replicas, span("gather", at + 5, at + 6), around_all]

    trace = trace_of(
        record(tmp_path / "dp", [[*one_pass(10, 0), *one_pass(20, 1)]], [["cpu:0", "cpu:1"]])
    )
    found = [[(e["name"], e["ts"] // 1000) for e in chain] for chain in arrows(trace, "replica")]
    assert found == [
        [("scatter", 10), ("replica_forward", 11), ("gather", 15)],
        [("scatter", 10), ("replica_forward", 11), ("gather", 15)],
        [("scatter", 20), ("replica_forward", 21), ("gather", 25)],
        [("scatter", 20), ("replica_forward", 21), ("gather", 25)],
    ]
    assert {e["args"]["replica"] for e in phase(trace, "X") if e["name"] == "replica_forward"} == {
        0,
        1,
    }


@pytest.mark.parametrize("kept_lines", [0, 1, 9])
def test_a_killed_run_has_the_trace_of_what_it_wrote(tmp_path, kept_lines):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    for path in (folder / "events").iterdir():
        kept = path.read_text().splitlines()[:kept_lines]
        path.write_text("".join(line + "\n" for line in kept) + '{"event":"forw')
    (folder / "events" / "rank1.jsonl").unlink()
    trace = trace_of(folder)
    assert {e["args"]["name"] for e in phase(trace, "M") if e["name"] == "process_name"} == {
        "rank 0 · cpu:0",
        "rank 1 · cpu:1",
    }
    assert len(phase(trace, "X")) == max(0, kept_lines - 2)  # the first two lines are no spans
    assert not [e for e in phase(trace, "C") if e["name"] == "loss"]


def test_an_error_and_a_loss_that_is_no_number(tmp_path):
    error = {
        "event": "error",
        "time": 0.03,
        "error": "ValueError: no",
        "detail": None,
        "traceback": "…",
    }
    folder = record(
        tmp_path / "run", [[span("step", 1, 2, loss=float("nan"), samples=4), error]], [["cpu:0"]]
    )
    trace = trace_of(folder)
    json.dumps(trace, allow_nan=False)
    assert [(e["name"], e["ts"], e["s"]) for e in phase(trace, "i")] == [
        ("ValueError: no", 30_000, "p")
    ]
    assert phase(trace, "X")[0]["args"]["loss"] == "nan"
    assert phase(trace, "C") == []


def test_a_trace_that_cannot_be_written_does_not_cost_the_result(tmp_path, monkeypatch):
    from paralab.experiment import run as training
    from paralab.record.folder import RunFolder

    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    training.finish(RunFolder(folder), 0.0)
    text = (folder / "trace.json").read_text(encoding="utf-8")
    assert json.loads(text) == trace_of(folder)
    assert "rank 0 · cpu:0" in text  # not \\u00b7, which Perfetto would show literally
    (folder / "result.json").unlink()
    result = training.finish(RunFolder(folder), 0.0)  # nothing is overwritten
    assert result["warnings"][-1].startswith("trace.json was not written")
    assert json.loads((folder / "result.json").read_text())["losses"] == result["losses"]


def test_an_arrow_is_named_after_its_collective(tmp_path):
    gather = [("all_gather", 1, 2, {"bucket": 0, "bytes": 8})]
    trace = trace_of(write(tmp_path / "run", plan(), lambda rank: gather, steps=1))
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "s"] == ["all-gather"]
