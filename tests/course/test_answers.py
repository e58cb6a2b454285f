"""The answers of the practicals on made-up evidence: what is said follows the numbers, and turns
when they turn."""

import copy
import re
from pathlib import Path

import msgspec
import pytest

from paralab.analyse.blocks import Answer, Table
from paralab.analyse.compare import Comparison
from paralab.analyse.phrases import factor, share
from paralab.analyse.verify import judge
from paralab.course import configurations as setups
from paralab.course import practical5
from paralab.course.batch_splits import chunks
from paralab.course.measurements import Measurements, Row, tell
from paralab.course.sheet import PRACTICALS
from paralab.record.events import Verify
from paralab.units import seconds, size
from tests.analyse.recordings import MACHINE, WORKLOAD
from tests.analyse.test_verify import EQUAL

MIB = 2**20
NAMES = {
    5: {"single": (1, 1), **{f"DataParallel, {n} devices": (1, n) for n in (2, 3, 5)}},
    6: {
        "single": (1, 1),
        "DataParallel, 2 devices": (1, 2),
        **{name: (2, 1) for name in (setups.DDP2, setups.ODD, setups.SMALL, setups.LARGE)},
    },
    7: dict.fromkeys(
        (
            setups.DDP,
            setups.ACCUMULATE,
            setups.SYNC,
            setups.BF16,
            setups.FP16,
            setups.BOTH,
            setups.FAINT,
            setups.FAINT_SCALED,
            setups.FAINT_BARE,
            setups.FAINT_BF16,
        ),
        (2, 1),
    ),
    10: {
        **dict.fromkeys(
            (setups.HYBRID, setups.MICRO2, setups.MICRO8, setups.HALF, setups.DOUBLE, setups.SAME),
            (2, 2),
        ),
        setups.PIPELINE: (1, 2),
        setups.MP: (1, 2),
    },
}


def row(name, processes, devices, step=0.030, batch=64, micro=1, **changed):
    """One set-up: `processes` ranks with `devices` devices each, `step` seconds in each of three
    rounds."""
    dp = name.startswith("DataParallel")
    share = batch // processes
    sizes = (
        chunks(batch, devices)
        if dp
        else [share + (rank < batch % processes) for rank in range(processes)]
    )
    every = [f"cpu:{number}" for number in range(devices * processes)]
    own = [every[rank::processes] for rank in range(processes)]
    buckets = [
        {
            "stage": 0,
            "bytes": MIB * n,
            "share_of_backward": 0.1 * n,
            "in_last_pass": True,
            "passes_done_before": micro - 1,
        }
        for n in (4, 8)
    ]
    bucket = {"kind": "all_reduce", "stage": 0, "bucket": 0, "bytes": MIB}
    bucket |= {"ready_seconds": 0.0, "transfer_seconds": 0.001, "bytes_per_second": None}
    memory = {
        "gathered": None,
        "unreduced": None,
        "process_bytes": None,
        "how": "counted",
        "parameters": 12 * MIB,
        "gradients": 12 * MIB,
        "activations": 4 * MIB,
    }
    found = {
        "name": name,
        "command": "",
        "request": {"strategy": "dp" if dp else "ddp" if processes > 1 else "single"},
        "accumulate": 1,
        "threads_per_device": 1,
        "round_seconds_per_sample": [step / batch] * 3,
        "samples_per_second_per_device": None,
        "all_gathers_per_step": 0,
        "reduce_scatters_per_step": 0,
        "not_finite_losses": 0,
        "warnings": [],
        "differences": [],
        "strategy": "dp" if dp else "ddp" if processes > 1 else "single",
        "precision": "fp32",
        "device": "cpu",
        "devices": devices * processes,
        "processes": processes,
        "ranks": [
            {
                "rank": rank,
                "local_rank": rank,
                "pid": 100 + rank,
                "devices": own[rank],
                "roles": [f"replica {n}" if dp else f"stage {n}" for n in range(devices)],
                "virtual": True,
                "shared": False,
                "node": "",
                "replica": rank,
                "stage": None,
                "samples_per_step": batch if dp else sizes[rank],
                "split": sizes if dp else [sizes[rank]],
            }
            for rank in range(processes)
        ],
        "batch": {
            "size": batch,
            "arithmetic": f"{batch} samples",
            "accumulate": 1,
            "micro_batches": micro,
        },
        "step_seconds": {"median": step, "p10": step * 0.98, "p90": step * 1.02},
        "round_seconds": [step * 0.99, step, step * 1.01],
        "total_seconds": 20 * step,
        "samples_per_second": batch / step,
        "all_reduces_per_step": 2 if processes > 1 else 0,
        "bytes_per_step": 12 * MIB if processes > 1 else 0,
        "peak_bytes": [
            {"rank": rank, "device": device, "bytes": 40 * MIB, "optimizer": 12 * MIB, **memory}
            for rank in range(processes)
            for device in own[rank]
        ],
        "metrics": {
            **{f"{part}_seconds": step * 0.3 for part in ("forward", "backward", "optimizer")},
            **dict.fromkeys(("waiting_seconds", "other_seconds", "data_seconds"), 0.0),
            "steps_measured": 20,
            "per_rank": [],
            "flops": {"per_second": None, "share_of_peak": None, "not_measured": "made up"},
            "not_measured": {},
            "compute_seconds": step * 0.6,
            "communication_seconds": step * 0.2,
            "exposed_communication_seconds": step * 0.15,
            "exposed_waiting_seconds": 0.0,
            "overlap": 0.25,
            "communication_share": 0.2,
            "exposed_share": 0.15,
            "keeps_rule": False,
            "data_wait_seconds": 0.0,
            "buckets": [bucket] * 2,
            "straggler": None,
            "bubble": {"measured": 1 / (micro + 1), "ideal": 1 / (micro + 1)}
            if not dp and devices > 1
            else None,
            "busy": [
                {"rank": rank, "device": device, "seconds": 0.8 * step, "share": 0.8}
                for rank in range(processes)
                for device in own[rank]
            ],
            "balance": 1.0 if devices * processes > 1 else None,
            "load": {"cores_per_rank": [1.0] * processes, "gpu": [], "not_measured": None},
            "gradients": {
                "total": 1000,
                "zeros": 50,
                "not_finite": 0,
                "scale": 65536.0 if "with GradScaler" in name else None,
            },
        },
        "losses": [6.9, 6.8, 6.7],
        "splits": [
            {"rank": 0, "device": f"cpu:{n}", "physical": "cpu", "shape": [size, 8]}
            for n, size in enumerate(sizes)
        ],
        "skipped_steps": 0,
        "verify": judge("fp64", [Verify(**EQUAL)] * 2).to_dict() | {"max_difference": 1e-17},
        "loss_difference": 0.0,
        "remarks": [],
        "runs": [],
        "observed": {
            "passes": {
                "forward": micro,
                "backward": micro,
                "stages": devices,
                "micro_batches": micro,
            },
            "copying": {
                kind: {"seconds": 0.001, "bytes": MIB, "times": 1} for kind in practical5.MECHANISM
            }
            if dp
            else {},
            "buckets": buckets if processes > 1 else [],
            "all_reduces_by_pass": [2],
            "loss_parts": [3.45 + 0.01 * rank for rank in range(processes)],
            "optimizer_steps": 1,
            "steps": 20,
            "status": "completed",
            "threads_per_device": 1,
            "stage_bytes": [],
            "loss_scale": None,
        },
    }
    return found | changed


def comparison(number):
    rows = [row(name, *shape) for name, shape in NAMES[number].items()]
    found = {
        "kind": "practical",
        "about": {"practical": number},
        "rows": rows,
        "failed": [],
        "left_out": [],
        "machine": dict(MACHINE),
        "workload": WORKLOAD | {"parameter_bytes": 12 * MIB},
        "packages": {},
        "command": [],
        "baseline": None,
        "run_folder": "",
        "rounds": 3,
    }
    by_name = {row["name"]: row for row in rows}
    if number == 6:
        by_name[setups.ODD].update(row(setups.ODD, 2, 1, batch=65))
    if number == 7:
        for name in (setups.ACCUMULATE, setups.SYNC):
            many = [2] * 4 if name == setups.SYNC else [0, 0, 0, 2]
            by_name[name]["observed"] |= {
                "all_reduces_by_pass": many,
                "passes": {"forward": 4, "backward": 4, "stages": 1, "micro_batches": 1},
            }
            by_name[name]["all_reduces_per_step"] = sum(many)
        by_name[setups.BF16]["precision"] = by_name[setups.BOTH]["precision"] = "bf16"
        by_name[setups.FP16]["precision"] = "fp16"
        by_name[setups.FAINT_BARE]["metrics"]["gradients"]["zeros"] = 600
    if number == 10:
        for name, micro, batch in (
            (setups.HYBRID, 4, 64),
            (setups.MICRO2, 2, 64),
            (setups.MICRO8, 8, 64),
            (setups.HALF, 4, 32),
            (setups.DOUBLE, 4, 128),
            (setups.SAME, 4, 64),
        ):
            by_name[name].update(row(name, 2, 2, micro=micro, batch=batch))
        for rank in by_name[setups.SAME]["ranks"]:
            rank["devices"] = rank["devices"][:1] * 2
    return found, by_name


def measurements(found):
    """The typed evidence of these dicts, which tests change."""
    rows = {row["name"]: msgspec.convert(row, Row) for row in found["rows"]}
    missing = {each["name"]: each["reason"] for each in found["left_out"]}
    missing |= {each["name"]: each["error"] for each in found["failed"]}
    typed = msgspec.convert(found | {"failed": []}, Comparison)
    return Measurements(rows, missing, typed, Path())


def answers(found):
    sections = tell(PRACTICALS[found["about"]["practical"]].parts, measurements(found))
    return {
        block.question: block
        for section in sections
        for block in section.blocks
        if isinstance(block, Answer)
    }


def slower(of, factor):
    of["round_seconds"] = [value * factor for value in of["round_seconds"]]
    of["step_seconds"] = {name: value * factor for name, value in of["step_seconds"].items()}


def numbers_in(text):
    return re.findall(r"\d+(?:\.\d+)?", text)


def as_told(value):
    """An evidence's numbers and names in every way in which a sentence may put them."""
    if isinstance(value, dict):
        return {words for item in value.values() for words in as_told(item)}
    if isinstance(value, list | tuple):
        return {words for item in value for words in as_told(item)}
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, str):
        return {value}
    return {
        f"{value:g}",
        f"{value:.4f}",
        f"{value:.1e}",
        f"{value:,.0f}",
        seconds(value),
        size(value),
        share(value),
        factor(value),
    }


@pytest.mark.parametrize("number", [5, 6, 7, 10])
def test_every_cell_is_filled_and_every_answer_has_a_number_and_its_evidence(number):
    found, _ = comparison(number)
    sections = tell(PRACTICALS[number].parts, measurements(found))
    assert [section.title.split(":")[0] for section in sections] == [
        f"Part {n + 1}" for n in range(len(sections))
    ]
    for section in sections:
        blocks = [block for block in section.blocks if isinstance(block, Table | Answer)]
        assert any(isinstance(block, Table) for block in blocks), section.title
        assert any(isinstance(block, Answer) for block in blocks), section.title
        for block in blocks:
            if isinstance(block, Answer):
                assert any(words in block.text for words in as_told(block.evidence)), block
                assert numbers_in(block.text), block
            else:
                assert all(len(line) == len(block.columns) for line in block.rows), block.title
                assert all(
                    cell.text and "not measured" not in cell.text
                    for line in block.rows[0:]
                    for cell in line[1:]
                ), block


def test_one_part_is_told_alone_and_a_failed_set_up_is_said():
    found, by_name = comparison(5)
    found["about"]["parts"] = [3]
    [section] = tell(practical5.PARTS, measurements(found))
    assert section.title == "Part 3: the comparison"
    found["rows"].remove(by_name["DataParallel, 2 devices"])
    found["failed"] = [{"name": "DataParallel, 2 devices", "error": "Rank 0: out of memory"}]
    [section] = tell(practical5.PARTS, measurements(found))
    assert "out of memory" in section.text
    assert not section.blocks


@pytest.mark.parametrize(
    ("factor", "faster", "proportional", "words"),
    [
        (0.50, True, True, "2.00 times as fast"),
        (0.70, True, False, "1.43 times as fast"),
        (1.00, False, False, "no measurable difference"),
        (1.50, False, False, "0.67 times as fast"),
    ],
)
def test_data_parallel_faster_or_slower(factor, faster, proportional, words):
    found, by_name = comparison(5)
    slower(by_name["DataParallel, 2 devices"], factor)
    told = answers(found)
    assert told["Did it get faster?"].verdict is faster
    assert words in told["Did it get faster?"].text
    assert told["Is the speed-up proportional to the number of devices?"].verdict is proportional


def test_rounds_that_cannot_tell_give_no_verdict():
    found, by_name = comparison(5)
    by_name["DataParallel, 2 devices"]["round_seconds"] = [0.010, 0.030, 0.060]
    assert answers(found)["Did it get faster?"].verdict is None
    for of in by_name.values():
        of["round_seconds"] = of["round_seconds"][:1]
    assert "too few rounds" in answers(found)["Did it get faster?"].text


def test_device_0_is_the_bottleneck_only_where_it_works_longer():
    found, by_name = comparison(5)
    dp = by_name["DataParallel, 2 devices"]
    assert answers(found)["Is device 0 more loaded than the others?"].verdict is False
    dp["metrics"]["balance"] = 1.5
    assert answers(found)["Is device 0 more loaded than the others?"].verdict is True
    dp["metrics"]["load"]["gpu"] = [
        {"device": f"cuda:{n}", "utilization": load, "used_bytes": 0}
        for n, load in enumerate((0.5, 0.5))
    ]
    assert "NVML" in answers(found)["Is device 0 more loaded than the others?"].text
    assert answers(found)["Is device 0 more loaded than the others?"].verdict is False
    dp["observed"]["copying"]["reduce"]["seconds"] = 0.02
    assert "device 0 is the bottleneck" in answers(found)["Where is the bottleneck?"].text


def test_the_splits_of_64_over_2_3_and_5():
    assert [chunks(64, n) for n in (2, 3, 5)] == [[32, 32], [22, 22, 20], [13, 13, 13, 13, 12]]
    found, by_name = comparison(5)
    told = answers(found)
    assert "22/22/20" in told["When is it uneven, and why?"].text
    assert told["When is the split equal?"].evidence["equal_with_devices"] == [2]
    by_name["DataParallel, 3 devices"]["splits"][0]["shape"][0] = (
        24  # another split than torch.chunk's is seen
    )
    assert "NOT" in answers(found)["Who splits the batch?"].text


def test_ddp_balanced_or_not_and_faster_or_slower_than_dp():
    found, by_name = comparison(6)
    ddp = by_name[setups.DDP2]
    told = answers(found)
    assert told["Is the load balanced?"].verdict is True
    assert told["Is device 0 still a bottleneck?"].verdict is False
    assert told["Is DDP faster than DataParallel?"].verdict is False
    ddp["metrics"]["balance"] = 1.4
    ddp["metrics"]["straggler"] = {
        "rank": 0,
        "share_of_step": 0.3,
        "waited_seconds": 0.01,
        "last_in": 9,
        "of": 9,
    }
    slower(ddp, 0.5)
    told = answers(found)
    assert told["Is the load balanced?"].verdict is False
    assert told["Is device 0 still a bottleneck?"].verdict is True
    assert told["Is DDP faster than DataParallel?"].verdict is True
    assert "DDP scales better" in told["Which one scales better?"].text
    slower(ddp, 4)
    assert "DataParallel scales better" in answers(found)["Which one scales better?"].text


def test_the_rule_of_a_tenth_and_the_buckets():
    found, by_name = comparison(6)
    told = answers(found)
    assert told["Does the communication stay below a tenth of the step?"].verdict is False
    assert told["Do small buckets hide more of the communication?"].verdict is False
    by_name[setups.DDP2]["metrics"] |= {"communication_share": 0.05, "keeps_rule": True}
    by_name[setups.SMALL]["metrics"]["overlap"] = 0.9
    told = answers(found)
    assert told["Does the communication stay below a tenth of the step?"].verdict is True
    assert told["Do small buckets hide more of the communication?"].verdict is True


def test_accumulation_saves_memory_or_not_and_no_sync_matters_or_not():
    found, by_name = comparison(7)
    told = answers(found)
    assert told["Does accumulation save memory?"].verdict is False
    assert (
        "8 all-reduces per step instead of 2"
        in told["What happens when no_sync() is removed?"].text
    )
    for entry in by_name[setups.ACCUMULATE]["peak_bytes"]:
        entry["bytes"] = 30 * MIB
    by_name[setups.SYNC]["all_reduces_per_step"] = 2
    told = answers(found)
    assert told["Does accumulation save memory?"].verdict is True
    assert "accumulation saves more" in told["Which saves more memory?"].text
    assert told["What happens when no_sync() is removed?"].text.startswith("Nothing changes")


def test_mixed_precision_faster_or_slower_and_underflow_or_not():
    found, by_name = comparison(7)
    slower(by_name[setups.BF16], 0.5)
    told = answers(found)
    assert told["Is mixed precision faster?"].verdict is True
    assert "mixed precision gains more" in told["Which gains more speed?"].text
    assert told["Do gradients underflow without GradScaler?"].verdict is True
    by_name[setups.FAINT_BARE]["metrics"]["gradients"]["zeros"] = 50
    slower(by_name[setups.BF16], 4)
    slower(by_name[setups.FP16], 4)
    told = answers(found)
    assert told["Is mixed precision faster?"].verdict is False
    assert told["Do gradients underflow without GradScaler?"].verdict is False


def test_a_precision_that_does_not_run_here_is_told_with_its_reason():
    found, _ = comparison(7)
    gone = (
        setups.BF16,
        setups.FP16,
        setups.BOTH,
        setups.FAINT_BARE,
        setups.FAINT_SCALED,
        setups.FAINT_BF16,
    )
    found["rows"] = [of for of in found["rows"] if of["name"] not in gone]
    found["left_out"] = [{"name": name, "reason": "SIGILL in a trial process"} for name in gone]
    told = answers(found)
    assert "SIGILL" in told["Is mixed precision faster?"].text
    assert "SIGILL" in told["Do gradients underflow without GradScaler?"].text
    assert "SIGILL" in told["Which saves more memory?"].text


def test_debugging_names_what_it_sees():
    found, by_name = comparison(7)
    told = answers(found)["Is the run slow for one of the known reasons?"]
    assert told.verdict is True
    assert "Slow communication (20 %)" in told.text
    metrics = by_name[setups.DDP]["metrics"]
    metrics |= {"keeps_rule": True, "communication_share": 0.01}
    assert answers(found)["Is the run slow for one of the known reasons?"].verdict is False
    metrics["data_wait_seconds"] = 0.02
    by_name[setups.DDP]["observed"]["threads_per_device"] = 4
    told = answers(found)["Is the run slow for one of the known reasons?"]
    assert "Slow data" in told.text
    assert "too many threads (8)" in told.text


def test_the_hybrid_synchronizes_once_or_is_said_not_to():
    found, by_name = comparison(10)
    told = answers(found)
    assert "once per optimizer step" in told["When does synchronization happen?"].text
    assert told["Does synchronization still happen?"].verdict is False
    assert told["Are several devices still used by a rank?"].verdict is False
    assert told["Does the idle share of the devices fall with more micro-batches?"].verdict is True
    by_name[setups.HYBRID]["observed"]["buckets"][0]["in_last_pass"] = False
    by_name[setups.MICRO8]["metrics"]["bubble"]["measured"] = 0.9
    by_name[setups.MICRO8]["all_reduces_per_step"] = 16
    told = answers(found)
    assert "1 begin earlier" in told["When does synchronization happen?"].text
    assert told["Does the idle share of the devices fall with more micro-batches?"].verdict is False
    assert told["Does the synchronization change?"].verdict is True


def test_a_larger_batch_and_what_stays():
    found, by_name = comparison(10)
    told = answers(found)
    assert told["Does a larger batch train more samples per second?"].verdict is True
    assert "forward passes (4)" in told["What stays?"].text
    changed = copy.deepcopy(found)
    for of in changed["rows"]:
        of["samples_per_second"] = 1000.0
    assert answers(changed)["Does a larger batch train more samples per second?"].verdict is False
    by_name[setups.DOUBLE]["all_reduces_per_step"] = 8
    assert "all-reduces" in answers(found)["What changes with the batch size?"].text


def on_one_gpu(found):
    """The same evidence as one GPU gives it: all devices are cuda:0, memory is the allocator's,
    DataParallel's inside is hidden."""
    found["machine"]["gpus"] = [{"name": "a GPU", "memory_bytes": 1, "capability": [9, 0]}]
    for of in found["rows"]:
        of["device"] = "cuda"
        dp = of["strategy"] == "dp"
        for rank in of["ranks"]:
            rank.update(devices=["cuda:0"] * len(rank["devices"]), virtual=False)
        for split in of["splits"]:
            split.update(device="cuda:0", physical="cuda:0")
        of["devices"] = 1
        of["remarks"] = [
            "shared: cuda:0 does the work of several devices, so nothing can get faster by it"
        ]
        own = {entry["rank"]: entry for entry in of["peak_bytes"]}
        of["peak_bytes"] = [
            entry | {"device": "cuda:0", "how": "allocator", "activations": None}
            for entry in own.values()
        ]
        of["metrics"]["busy"] = [
            {"rank": rank["rank"], "device": "cuda:0", "seconds": 0.01, "share": 0.5}
            for rank in of["ranks"]
        ]
        of["metrics"]["balance"] = None if dp or len(of["ranks"]) < 2 else 1.0
        of["metrics"]["load"]["gpu"] = [{"device": "cuda:0", "utilization": 0.5, "used_bytes": MIB}]
        if dp:
            timed = ("scatter", "replicate", "gather")
            of["observed"]["copying"] = {
                kind: {"seconds": 0.001, "bytes": None, "times": 1} for kind in timed
            }


@pytest.mark.parametrize("number", [5, 6, 7, 10])
def test_on_one_gpu_what_cannot_be_known_is_told_with_its_reason(number):
    found, _ = comparison(number)
    on_one_gpu(found)
    for section in tell(PRACTICALS[number].parts, measurements(found)):
        for block in section.blocks:
            if isinstance(block, Table):
                assert all(
                    cell.text and cell.text != "not measured"
                    for line in block.rows
                    for cell in line
                ), block
            if isinstance(block, Answer):
                assert numbers_in(block.text), block
                assert "None" not in block.text, block
    told = answers(found)
    if number == 5:
        assert "all replicas share it" in told["Is device 0 more loaded than the others?"].text
        assert (
            "inside the backward pass"
            in told["Does it collect outputs and gradients on device 0?"].text
        )
        assert (
            "shared: cuda:0" in told["Is the speed-up proportional to the number of devices?"].text
        )
