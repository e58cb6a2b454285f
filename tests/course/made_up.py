"""Invented measurements for the practicals, as dicts that a test can change before it converts
them."""

import msgspec

from paralab.analyse.blocks import Answer
from paralab.analyse.compare import Comparison
from paralab.analyse.judge import judge
from paralab.course.configurations import LABELS, find
from paralab.course.measurements import Measured, Measurements
from paralab.course.template import fill
from paralab.record.events import Verify
from tests.analyse.recordings import MACHINE, WORKLOAD
from tests.analyse.test_verify import EQUAL

MIB = 2**20
SHAPES = {  # (processes, devices per process)
    "5": {"single": (1, 1), "dp2": (1, 2), "dp3": (1, 3), "dp5": (1, 5)},
    "6": {"single": (1, 1), "dp2": (1, 2), "ddp2": (2, 1), "odd": (2, 1)},
    "7": dict.fromkeys(
        (
            *("ddp", "accumulate", "sync", "bf16", "fp16", "both"),
            *("faint", "faint_scaled", "faint_bare", "faint_bf16"),
        ),
        (2, 1),
    ),
    "10": {
        **dict.fromkeys(("hybrid", "micro2", "micro8", "half", "double", "same"), (2, 2)),
        "pipeline": (1, 2),
    },
    "handbook": {
        "single": (1, 1),
        **dict.fromkeys(("ddp2", "small_buckets", "one_bucket"), (2, 1)),
    },
}


def row(key, processes, devices, step=0.030, batch=64, micro=1, **changed):
    """Create a configuration with `processes` ranks, `devices` devices each, and `step` seconds
    per step in three rounds."""
    name, dp = LABELS[key], key.startswith("dp")
    share = batch // processes
    sizes = (
        [len(part) for part in torch_chunks(batch, devices)]
        if dp
        else [share + (rank < batch % processes) for rank in range(processes)]
    )
    every = [f"cpu:{number}" for number in range(devices * processes)]
    own = [every[rank::processes] for rank in range(processes)]
    buckets = [{"bytes": MIB * n, "share_of_backward": 0.1 * n} for n in (4, 8)]
    bucket = {"kind": "all_reduce", "stage": 0, "bucket": 0, "bytes": MIB}
    bucket |= {
        "ready_seconds": 0.0,
        "ready_share": 0.0,
        "transfer_seconds": 0.001,
        "bytes_per_second": None,
    }
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
                "shard": None,
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
        "samples_per_step": batch,
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
            "copying": dict.fromkeys(("replicate", "scatter", "gather", "reduce"), 0.001)
            if dp
            else {},
            "buckets": buckets if processes > 1 else [],
            "all_reduces_by_pass": [2],
            "loss_parts": [3.45 + 0.01 * rank for rank in range(processes)],
            "optimizer_steps": 1,
            "steps": 20,
            "status": "completed",
        },
    }
    return found | changed


def torch_chunks(batch, parts):
    """Split like torch.chunk: ceil(batch / parts) samples each until none are left."""
    size = -(-batch // parts)
    return [range(start, min(start + size, batch)) for start in range(0, batch, size)]


def made_up(name):
    """Return a comparison as dicts, and its rows by key. Tests change both."""
    by_key = {key: row(key, *shape) for key, shape in SHAPES[name].items()}
    if name == "6":
        by_key["odd"] = row("odd", 2, 1, batch=65)
    if name == "7":
        for key, many in (("accumulate", [0, 0, 0, 2]), ("sync", [2] * 4)):
            passes = {"forward": 4, "backward": 4, "stages": 1, "micro_batches": 1}
            by_key[key]["observed"] |= {"all_reduces_by_pass": many, "passes": passes}
            by_key[key]["all_reduces_per_step"] = sum(many)
        by_key["bf16"]["precision"] = by_key["both"]["precision"] = "bf16"
        by_key["fp16"]["precision"] = "fp16"
        by_key["faint_bare"]["metrics"]["gradients"]["zeros"] = 600
    if name == "10":
        sizes = {"hybrid": (4, 64), "micro2": (2, 64), "micro8": (8, 64)}
        sizes |= {"half": (4, 32), "double": (4, 128), "same": (4, 64)}
        for key, (micro, batch) in sizes.items():
            by_key[key] = row(key, 2, 2, micro=micro, batch=batch)
        for rank in by_key["same"]["ranks"]:
            rank["devices"] = rank["devices"][:1] * 2
    return by_key


def measurements(name, by_key, failed=()):
    """Convert these dicts to typed measurements, without reading a folder."""
    comparison = msgspec.convert(
        {
            "kind": "practical",
            "about": {"practical": name},
            "rows": [{k: v for k, v in row.items() if k != "observed"} for row in by_key.values()],
            "failed": [],
            "left_out": [{"name": LABELS[key], "reason": why} for key, why in failed],
            "machine": dict(MACHINE),
            "workload": WORKLOAD | {"parameter_bytes": 12 * MIB},
            "packages": {"torch": "2.13.0"},
            "command": [],
            "baseline": None,
            "run_folder": "",
            "rounds": 3,
        },
        Comparison,
    )
    lab = Measurements(comparison)
    typed = {key: msgspec.convert(row | {"key": key}, Measured) for key, row in by_key.items()}
    vars(lab)["rows"] = typed
    return lab


def fill_sheet(name, by_key, failed=()):
    return fill(find(name).template, measurements(name, by_key, failed), None)


def answers(name, by_key, failed=()):
    """{(part, question): answer}"""
    return {
        (int(section.title.split(":")[0].split()[1]), block.question): block
        for section in fill_sheet(name, by_key, failed).sections
        for block in section.blocks
        if isinstance(block, Answer)
    }


def slow_down(row, factor):
    row["round_seconds"] = [value * factor for value in row["round_seconds"]]
    row["step_seconds"] = {name: value * factor for name, value in row["step_seconds"].items()}
