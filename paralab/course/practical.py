"""Run a practical: measure its configurations in one launch, and fill in the sheet."""

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paralab.analyse import explore
from paralab.analyse.blocks import Answer, Document, Finding
from paralab.analyse.compare import Comparison, comparison_of
from paralab.analyse.manifest import About, about_of
from paralab.analyse.phrases import machine_words
from paralab.analyse.report import facts
from paralab.analyse.verdict import verdict
from paralab.course.check import CHECKPOINT
from paralab.course.configurations import LONGEST_SECONDS, MOST, Practical, configurations, find
from paralab.course.measurements import Measurements
from paralab.course.predict import add_predictions, read_predictions
from paralab.course.template import fill
from paralab.errors import UsageError
from paralab.experiment.compare import compare
from paralab.experiment.planning import inspect_once
from paralab.plan.remarks import find_sharing
from paralab.plan.request import Request
from paralab.units import plural
from paralab.workload.reference import check_reference

VARIANT_BATCHES = (32, 56, 64, 88, 104, 112)  # split evenly over 2 devices, but not 3 or 5
Print = Callable[[str], None]


def run(
    name: str,
    part: int | None = None,
    *,
    base: Request,
    variant: str | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    say: Print = lambda line: None,
) -> tuple[Document, Path]:
    """Train the configurations that the practical (or one part) needs. Return the filled sheet and
    its folder. Without `rounds`, measure longer while a question has no clear answer."""
    practical = find(name)
    parts = choose_parts(practical, part)
    say("inspecting the machine and the workload")
    workload = check_reference(base.workload)
    base = replace(base, workload=workload, steps=steps or practical.steps)
    if variant:
        base = vary(base, variant)
    machine, summary = inspect_once(base, ["pipeline"] if name == "10" else [])

    known = configurations(base, machine, summary)
    needs = fill(practical.template, None, parts).needs
    wanted = dict.fromkeys(key for number in parts for key in needs[number])
    cases = [known[key] for key in wanted if key in known]
    first = rounds or practical.rounds
    say(f"practical {name}: {plural(len(cases), 'configuration')}, {plural(first, 'round')}")

    def measure_longer(comparison: Comparison, seconds: float) -> bool:
        done = comparison.rounds // first
        open_questions = undecided(document(comparison))
        if rounds or not open_questions or done >= MOST:
            return False
        fits = seconds * (done + 1) / done <= LONGEST_SECONDS
        what = "measuring longer" if fits else "no time left"
        say(f"too noisy to tell, {what} (limit: {practical.limit}): {open_questions[0]}")
        return fits

    about = About(practical=name, parts=tuple(parts), variant=variant or "")
    measure = partial(compare, cases, kind="practical", about=about, out=out, say=say)
    comparison = measure(rounds=first, more=measure_longer)
    return document(comparison), Path(comparison.run_folder)


def choose_parts(practical: Practical, part: int | None) -> list[int]:
    known = list(fill(practical.template, None, None).needs)
    if part is not None and part not in known:
        fix = f"--part 1 … {max(known)}"
        raise UsageError(f"Practical {practical.name} has no part {part}.", fix=fix)
    return known if part is None else [part]


def vary(base: Request, student: str) -> Request:
    """Derive the seed and batch size from the student, so that students get different sheets."""
    number = int.from_bytes(hashlib.sha256(student.encode()).digest()[:4], "big")
    batch = base.batch_size or VARIANT_BATCHES[number % len(VARIANT_BATCHES)]
    return replace(base, seed=number, batch_size=batch)


def blank(name: str, part: int | None = None) -> Document:
    """Return a blank sheet for students. It does not need a run and does not contain solutions."""
    practical = find(name)
    sheet = fill(practical.template, None, choose_parts(practical, part))
    subtitle = (
        "Fill in each cell. Write what you expect after `Predicted:` before you measure. Start the "
        "answer to a yes-or-no question with Yes or No. Start the answer to a which-one question "
        "with the name of your choice."
    )
    return Document(sheet.title, subtitle, (), tuple(sheet.sections))


def document(comparison: Comparison) -> Document:
    """Return the filled sheet for a finished run."""
    about, lab = comparison.about, Measurements(comparison)
    sheet = fill(find(about.practical or "").template, lab, about.parts or None)
    size = f"{plural(len(lab.rows), 'configuration')}, {plural(comparison.rounds, 'round')}"
    subtitle = f"{comparison.workload.name} on {machine_words(comparison)}; {size}"
    filled = Document(
        sheet.title,
        subtitle,
        _findings(comparison),
        tuple(sheet.sections),
        facts(comparison),
        explore=(explore.section(comparison),) if comparison.rows else (),
    )
    return add_predictions(filled, read_predictions(Path(comparison.run_folder)))


def undecided(document: Document) -> list[str]:
    """Return the questions that the timings cannot answer yet."""
    answers = [(part, answer) for part in document.sections for answer in part.of(Answer)]
    return [f"{part.title}, {answer.question}" for part, answer in answers if answer.undecided]


def checkpoint(sheet: Document) -> Document | None:
    """Return the handbook's verification checkpoint (part 4), which students hand in as a file."""
    parts = tuple(part for part in sheet.sections if CHECKPOINT in part.title and part.blocks)
    title = f"Handbook chapter 7: {CHECKPOINT}"
    return Document(title, sheet.subtitle, (), parts) if parts else None


def scripts() -> Path:
    """Return the folder with the course's plain PyTorch scripts, in the repository or installed."""
    here = Path(__file__).parents[2] / "practicals"
    return here if here.is_dir() else Path(sysconfig.get_path("data"), "share/paralab/practicals")


def document_of(folder: Path) -> Document:
    return document(comparison_of(folder))


def require_run(folder: Path, name: str, student: str | None = None) -> None:
    """Reject a run of another practical or of another student's variant."""
    find(name)
    about = about_of(folder)
    if about.practical != name:
        kind = f"a practical {about.practical} run" if about.practical else "not a practical run"
        fix = f"--run with a folder that paralab practical {name} wrote"
        raise UsageError(f"Expected a run of practical {name}, but {folder} is {kind}.", fix=fix)
    if student is not None and about.variant != student:
        whose = f"for {about.variant!r}" if about.variant else "without --variant"
        problem = f"{folder} was run {whose}, not with --variant {student}."
        raise UsageError(problem, fix=f"pass the run folder of {student}")


def newest(name: str, root: Path = Path("runs")) -> Path:
    """Return the newest run of a practical under runs/."""
    find(name)
    manifests = root.glob("*_practical_*/manifest.json")
    for path in sorted(manifests, key=lambda path: path.stat().st_mtime, reverse=True):
        if about_of(path.parent).practical == name:
            return path.parent
    fix = f"paralab practical {name}, or --run FOLDER"
    raise UsageError(f"{root}/ has no run of practical {name}.", fix=fix)


def _findings(comparison: Comparison) -> tuple[Finding, ...]:
    """Report whether all configurations train the same way, and what makes the timings less
    reliable."""
    findings = [finding for finding in verdict(comparison) if finding.kind in ("same", "warning")]
    shared = {row.name: why for row in comparison.rows if (why := find_sharing(row.remarks))}
    if shared:
        text = f"In {plural(len(shared), 'configuration')}, {list(shared.values())[-1]}."
        findings.append(Finding("limit", text, {"configurations": list(shared)}))
    return tuple(findings)
