"""`paralab practical`: the set-ups that each practical of the course needs, measured on the machine
at hand in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from paralab.analyse.blocks import Document
from paralab.analyse.manifest import About
from paralab.course import configurations as p
from paralab.course.measurements import LabPart
from paralab.course.sheet import document, find, number_of
from paralab.errors import UsageError
from paralab.experiment.compare import compare
from paralab.experiment.planning import look_once
from paralab.experiment.rounds import Configuration
from paralab.machine.host import Machine
from paralab.plan.request import Request
from paralab.units import plural
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

FAINT = "mlp:faint"  # a loss so small that fp16 gradients underflow
SLOW_STEPS = 4  # fp16 on a CPU without fp16 arithmetic is an order of magnitude slower

MakeCases = Callable[[Request, Machine, Summary], dict[str, Configuration]]


@dataclass(frozen=True)
class Measured:
    """How a practical is measured: its set-ups by the names that its parts use, and how long."""

    cases: MakeCases
    rounds: int
    steps: int


def _named(**cases: Request) -> dict[str, Configuration]:
    return {name: Configuration(request, name) for name, request in cases.items()}


def _cases5(base: Request, machine: Machine, summary: Summary) -> dict[str, Configuration]:
    dp = {
        name: replace(base, strategy="dp", replicas=number)
        for name, number in ((p.DP2, 2), (p.DP3, 3), (p.DP5, 5))
    }
    return _named(**{p.SINGLE: base, **dp})


def _cases6(base: Request, machine: Machine, summary: Summary) -> dict[str, Configuration]:
    ddp = replace(base, strategy="ddp", replicas=2)
    megabytes = summary.parameter_bytes / 2**20
    cases = {
        p.SINGLE: base,
        p.DP2: replace(base, strategy="dp", replicas=2),
        p.DDP2: ddp,
        p.ODD: replace(ddp, batch_size=(base.batch_size or summary.batch_size) + 1),
        p.SMALL: replace(
            ddp, bucket_mb=max(0.001, round(megabytes / 8, 3))
        ),  # so that there are several, whatever the model
        p.LARGE: replace(ddp, bucket_mb=max(1.0, round(2 * megabytes))),  # so that there is one
    }
    if machine.cores >= 4:
        cases |= {p.DP4: replace(base, strategy="dp", replicas=4), p.DDP4: replace(ddp, replicas=4)}
    return _named(**cases)


def _cases7(base: Request, machine: Machine, summary: Summary) -> dict[str, Configuration]:
    ddp = replace(base, strategy="ddp", replicas=2)
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    steps = None if on_gpu else SLOW_STEPS
    faint = replace(ddp, workload=FAINT, batch_size=None, steps=steps)
    sure = {
        p.DDP: ddp,
        p.ACCUMULATE: replace(ddp, accumulate=4),
        p.SYNC: replace(ddp, accumulate=4, sync_every_pass=True),
    }
    low = {
        p.BF16: replace(ddp, precision="bf16"),
        p.FP16: replace(ddp, precision="fp16", steps=steps),
        p.BOTH: replace(ddp, precision="bf16", accumulate=4),
        p.FAINT_SCALED: replace(faint, precision="fp16"),
        p.FAINT_BARE: replace(faint, precision="fp16", no_scaler=True),
        p.FAINT_BF16: replace(faint, precision="bf16"),
    }
    if on_gpu:
        low[p.BOTH_FP16] = replace(ddp, precision="fp16", accumulate=4)
    maybe = {name: Configuration(request, name, optional=True) for name, request in low.items()}
    return _named(**sure) | maybe | _named(**{p.FAINT: faint})


def _cases10(base: Request, machine: Machine, summary: Summary) -> dict[str, Configuration]:
    batch = base.batch_size or summary.batch_size
    hybrid = replace(base, strategy="hybrid", replicas=2, stages=2, micro_batches=4)
    return _named(
        **{
            p.HYBRID: hybrid,
            p.MICRO2: replace(hybrid, micro_batches=2),
            p.MICRO8: replace(hybrid, micro_batches=8),
            p.HALF: replace(hybrid, batch_size=batch // 2),
            p.DOUBLE: replace(hybrid, batch_size=batch * 2),
            p.PIPELINE: replace(base, strategy="pipeline", stages=2, micro_batches=4),
            p.MP: replace(base, strategy="mp", stages=2),
            p.SAME: replace(hybrid, placement="same"),
        }
    )


MEASURED: Mapping[int, Measured] = MappingProxyType(
    {
        5: Measured(_cases5, rounds=7, steps=20),
        6: Measured(_cases6, rounds=7, steps=20),
        7: Measured(_cases7, rounds=5, steps=12),
        10: Measured(_cases10, rounds=5, steps=10),
    }
)


def run(
    number: int,
    part: int | None = None,
    *,
    base: Request,
    rounds: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Document, Path]:
    """Measure what the practical (or one part of it) needs; return what there is to tell, and the
    folder that it is told from."""
    told, measured = find(number).parts, MEASURED[number]
    parts = [part] if part is not None else list(range(1, len(told) + 1))
    if not 1 <= parts[0] <= len(told):
        raise UsageError(f"Practical {number} has no part {part}.", fix=f"--part 1 … {len(told)}")
    say("looking at the machine and the workload")
    base = replace(base, workload=check_reference(base.workload))
    machine, summary = look_once(base.workload, base.device, number == 10, base.batch_size, 1)
    known = measured.cases(base, machine, summary)
    cases = [known[name] for name in _needed(told, parts) if name in known]
    say(
        f"practical {number}: {plural(len(cases), 'set-up')}, {plural(rounds or measured.rounds, 'round')}"
    )
    comparison = compare(
        cases,
        kind="practical",
        about=About(practical=number, parts=tuple(parts)),
        rounds=rounds or measured.rounds,
        steps=steps or measured.steps,
        out=out,
        say=say,
    )
    folder = Path(comparison.run_folder)
    return document(comparison, folder), folder


def _needed(parts: tuple[LabPart, ...], chosen: Iterable[int]) -> list[str]:
    """Every set-up once, in the order in which the parts ask for it."""
    return list(
        dict.fromkeys(
            name
            for number in chosen
            for name in (*parts[number - 1].needs, *parts[number - 1].likes)
        )
    )


def newest(number: int, root: Path = Path("runs")) -> Path:
    """The newest run of a practical under runs/."""
    found = root.glob("*_practical_*/manifest.json")
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        if number_of(path.parent) == number:
            return path.parent
    raise UsageError(
        f"There is no run of practical {number} under {root}/.",
        fix=f"paralab practical {number}, or --run FOLDER",
    )
