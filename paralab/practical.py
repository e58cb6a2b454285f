"""`paralab practical`: the course's practicals, run from start to end on the machine at hand; tables filled and questions answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paralab.analyse import practical5, practical6, practical7, practical10
from paralab.analyse.blocks import Document, Finding, Section
from paralab.analyse.comparison import comparison_of, read_manifest
from paralab.analyse.lab import LabPart
from paralab.comparison import compare
from paralab.errors import UsageError
from paralab.experiment import Case
from paralab.launch.inspect import look_at
from paralab.machine.host import Machine
from paralab.plan.request import Request
from paralab.units import plural
from paralab.workload.summary import Summary

FAINT = "mlp:faint"  # a loss so small that fp16 gradients underflow
SLOW_STEPS = 4  # fp16 on a CPU without fp16 arithmetic is an order of magnitude slower

MakeCases = Callable[[Request, Machine, Summary], dict[str, Case]]


@dataclass(frozen=True)
class Practical:
    """A practical: its parts (what they tell), and its set-ups by the names that the parts use."""

    title: str
    parts: tuple[LabPart, ...]
    cases: MakeCases
    rounds: int
    steps: int


def _named(**cases: Request) -> dict[str, Case]:
    return {name: Case(request, name) for name, request in cases.items()}


def _cases5(base: Request, machine: Machine, summary: Summary) -> dict[str, Case]:
    p = practical5
    dp = {name: replace(base, strategy="dp", replicas=number) for name, number in ((p.DP2, 2), (p.DP3, 3), (p.DP5, 5))}
    return _named(**{p.SINGLE: base, **dp})


def _cases6(base: Request, machine: Machine, summary: Summary) -> dict[str, Case]:
    p = practical6
    ddp = replace(base, strategy="ddp", replicas=2)
    megabytes = summary.parameter_bytes / 2**20
    cases = {
        p.SINGLE: base,
        p.DP2: replace(base, strategy="dp", replicas=2),
        p.DDP2: ddp,
        p.ODD: replace(ddp, batch_size=(base.batch_size or summary.batch_size) + 1),
        p.SMALL: replace(ddp, bucket_mb=max(0.001, round(megabytes / 8, 3))),  # so that there are several, whatever the model
        p.LARGE: replace(ddp, bucket_mb=max(1.0, round(2 * megabytes))),  # so that there is one
    }
    if machine.cores >= 4:
        cases |= {p.DP4: replace(base, strategy="dp", replicas=4), p.DDP4: replace(ddp, replicas=4)}
    return _named(**cases)


def _cases7(base: Request, machine: Machine, summary: Summary) -> dict[str, Case]:
    p = practical7
    ddp = replace(base, strategy="ddp", replicas=2)
    faint = replace(ddp, workload=FAINT, batch_size=None)
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    slow = {} if on_gpu else {"steps": SLOW_STEPS}
    sure = {p.DDP: ddp, p.ACCUMULATE: replace(ddp, accumulate=4), p.SYNC: replace(ddp, accumulate=4, sync_every_pass=True)}
    low = {
        p.BF16: replace(ddp, precision="bf16"),
        p.FP16: replace(ddp, precision="fp16", **slow),
        p.BOTH: replace(ddp, precision="bf16", accumulate=4),
        p.FAINT_SCALED: replace(faint, precision="fp16", **slow),
        p.FAINT_BARE: replace(faint, precision="fp16", no_scaler=True, **slow),
        p.FAINT_BF16: replace(faint, precision="bf16", **slow),
    }
    if on_gpu:
        low[p.BOTH_FP16] = replace(ddp, precision="fp16", accumulate=4)
    maybe = {name: Case(request, name, optional=True) for name, request in low.items()}
    return _named(**sure) | maybe | _named(**{p.FAINT: replace(faint, **slow)})


def _cases10(base: Request, machine: Machine, summary: Summary) -> dict[str, Case]:
    p = practical10
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


PRACTICALS: Mapping[int, Practical] = MappingProxyType(
    {
        5: Practical("data parallelism with nn.DataParallel", practical5.PARTS, _cases5, rounds=5, steps=20),
        6: Practical("DistributedDataParallel and collective communication", practical6.PARTS, _cases6, rounds=5, steps=20),
        7: Practical("DDP optimisation and debugging", practical7.PARTS, _cases7, rounds=5, steps=12),
        10: Practical("hybrid parallelism: data, model, pipeline", practical10.PARTS, _cases10, rounds=5, steps=10),
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
    """Measure what the practical (or one part of it) needs; return what there is to tell, and the folder that it is told from."""
    practical = find(number)
    parts = [part] if part else list(range(1, len(practical.parts) + 1))
    if part and not 1 <= part <= len(practical.parts):
        raise UsageError(f"Practical {number} has no part {part}.", cure=f"--part 1 … {len(practical.parts)}")
    say("looking at the machine and the workload")
    machine, summary = look_at(base.workload, base.device, False, base.batch_size, 1)
    known = practical.cases(base, machine, summary)
    cases = [known[name] for name in _needed(practical.parts, parts) if name in known]
    say(f"practical {number}: {plural(len(cases), 'set-up')}, {plural(rounds or practical.rounds, 'round')}")
    comparison = compare(
        cases,
        kind="practical",
        about={"practical": number, "parts": parts},
        rounds=rounds or practical.rounds,
        steps=steps or practical.steps,
        out=out,
        say=say,
    )
    folder = Path(comparison["run_folder"])
    return _document(comparison, folder), folder


def find(number: int) -> Practical:
    if number not in PRACTICALS:
        raise UsageError(f"There is no practical {number}.", cure=f"one of: {', '.join(map(str, PRACTICALS))}")
    return PRACTICALS[number]


def _needed(parts: tuple[LabPart, ...], chosen: Iterable[int]) -> list[str]:
    """Every set-up once, in the order in which the parts ask for it."""
    return list(dict.fromkeys(name for number in chosen for name in (*parts[number - 1].needs, *parts[number - 1].likes)))


def number_of(folder: Path) -> int | None:
    """The practical that a folder is a run of; None where it is something else."""
    about = read_manifest(folder).get("about") or {}
    return about.get("practical")


def document_of(folder: Path) -> Document:
    """The same document again, from the folder alone."""
    if number_of(folder) is None:
        raise UsageError(f"{folder} is no run of a practical.", cure="a folder that `paralab practical` made")
    return _document(comparison_of(folder), folder)


def newest(number: int, root: Path = Path("runs")) -> Path:
    """The newest run of a practical under runs/."""
    found = sorted(
        (path for path in root.glob("*_practical_*") if (path / "manifest.json").exists()), key=lambda p: p.stat().st_mtime
    )
    for path in reversed(found):
        if number_of(path) == number:
            return path
    raise UsageError(f"There is no run of practical {number} under {root}/.", cure=f"paralab practical {number}, or --run FOLDER")


SECTIONS: Mapping[int, Callable[[dict[str, Any], Path], tuple[Section, ...]]] = MappingProxyType(
    {5: practical5.sections, 6: practical6.sections, 7: practical7.sections, 10: practical10.sections}
)


def _document(comparison: dict[str, Any], folder: Path) -> Document:
    number = comparison["about"]["practical"]
    rows = [row for row in comparison["rows"] if not row["error"]]
    return Document(
        title=f"Practical {number}: {find(number).title}",
        subtitle=f"{comparison['workload']['name']}, {plural(len(rows), 'set-up')}, {plural(comparison['rounds'], 'round')} in turns",
        findings=_findings(comparison),
        sections=SECTIONS[number](comparison, folder),
        facts=_facts(comparison),
    )


def _findings(comparison: dict[str, Any]) -> tuple[Finding, ...]:
    """Whether it was the same training everywhere, and what the timings depend on."""
    rows = [row for row in comparison["rows"] if not row["error"] and row["parity"]]
    wrong = {row["name"]: row["parity"]["cause"] for row in rows if not row["parity"]["equal"] and not row["parity"]["legitimate"]}
    largest = max((row["parity"]["max_difference"] or 0.0 for row in rows if row["parity"]["equal"]), default=0.0)
    findings = []
    if rows and not wrong:
        equal = sum(row["parity"]["equal"] for row in rows)
        text = f"{equal} of {plural(len(rows), 'set-up')} proved equal to one device in fp64; the largest difference of a parameter is {largest:.1e}."
        findings.append(Finding("same", text, {"equal": equal, "set_ups": len(rows), "max_difference": largest}))
    findings += [
        Finding("warning", f"{name} is not the same training: {cause}.", {"cause": cause}) for name, cause in wrong.items()
    ]
    failed = {row["name"]: row["error"] for row in comparison["rows"] if row["error"]}
    left_out = {entry["name"]: entry["reason"] for entry in comparison["left_out"]}
    findings += [Finding("warning", f"{name} failed: {reason}", {"error": reason}) for name, reason in failed.items()]
    findings += [Finding("limit", f"{name} was left out: {reason}", {"reason": reason}) for name, reason in left_out.items()]
    shared = dict.fromkeys(r for row in rows for r in row["remarks"] if r.startswith(("the devices share", "shared:")))
    findings += [
        Finding("limit", f"{remark[:1].upper()}{remark[1:]}.", {"cores": comparison["machine"]["cores"]}) for remark in shared
    ]
    return tuple(findings)


def _facts(comparison: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    machine, packages = comparison["machine"], comparison["packages"]
    gpus = machine["gpus"]
    where = f"{plural(len(gpus), 'GPU')} ({gpus[0]['name']})" if gpus else f"{plural(machine['cores'], 'core')} of {machine['cpu']}"
    return (
        ("machine", where),
        ("versions", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        ("workload", f"{comparison['workload']['name']}: {comparison['workload']['parameters']:,} parameters"),
        ("command", " ".join(comparison["command"])),
    )
