"""Show a diagnosis in the terminal: each failure once, with its line, reason, fix, patch, and the
other places where it occurs; then a summary."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from paralab.doctor.patch import Fixes, diff, shown_path
from paralab.doctor.registry import Finding, MachineFact
from paralab.doctor.report import Diagnosis
from paralab.doctor.show.lines import shown_findings
from paralab.doctor.sources import Sources
from paralab.show.console import console, errors, fact_table, plain_table, show_table
from paralab.units import plural

STYLES = {"error": "bold red", "warning": "bold yellow", "suspect": "bold cyan"}
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}
AROUND = 2  # lines of context before and after
MOST_PLACES = 20  # show this many places for one failure; --format concise lists all of them


def print_diagnosis(diagnosis: Diagnosis, suspects: bool = False) -> None:
    print_facts(diagnosis.facts)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in shown_findings(diagnosis, suspects):
        groups.setdefault((finding.severity, finding.id), []).append(finding)
    for findings in groups.values():
        print_group(findings, diagnosis.sources)
    print_remarks(diagnosis)
    first, *rest = diagnosis.summary(suspects)
    healthy = not groups and not diagnosis.exit_code()
    _print(Text(first, style="bold green" if healthy else "bold"))
    for line in rest:
        _print(Text(line, style="dim"))


def print_facts(rows: Sequence[MachineFact]) -> None:
    if not rows:
        return
    table = plain_table("what", "value", "verdict")
    for row in rows:
        style = {**STYLES, "good": "green"}.get(row.verdict.split()[0], "dim")
        table.add_row(row.name, Text(row.value or ""), Text(row.verdict, style))
    show_table(table)


def _print(text: Text) -> None:
    """Print a sentence, wrapped between words in a terminal, or on one line in a pipe."""
    console.print(text, soft_wrap=not console.is_terminal)


def _print_code(text: Text) -> None:
    """Print a line of code, cut off at the terminal's width."""
    if console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis")
    else:
        console.print(text, soft_wrap=True, crop=False)


def print_remarks(diagnosis: Diagnosis) -> None:
    for failure in diagnosis.failures:
        _print(Text.assemble(("not checked ", "yellow"), str(failure)))
    for note in diagnosis.notes:
        _print(Text.assemble(("note ", "dim"), note))


def print_group(findings: Sequence[Finding], sources: Sources) -> None:
    """Print findings with the same id: the first one in full, then the places of the others."""
    first, *others = findings
    headline = _headline(first)
    if others:
        headline.append(f" and {plural(len(others), 'more place')}")
    _print(headline)
    context = _context(first, sources)
    for line in context:
        _print_code(line)

    table = fact_table()
    table.add_row("  why", Text(first.why))
    table.add_row("  fix", Text(first.fix))
    # The evidence often begins with the line that the context already shows.
    shown = f"{Path(first.file).name}:{first.line}:" if first.file and context else None
    for evidence in first.evidence:
        if not (shown and evidence.startswith(shown)):
            table.add_row("  evidence", Text(evidence))
    if first.gain:
        table.add_row("  gain", f"{first.gain:.0%} of the step")
    for number, other in enumerate(others[:MOST_PLACES]):
        table.add_row("" if number else "  also", _place_and_code(other, sources))
    if len(others) > MOST_PLACES:
        table.add_row("", f"and {len(others) - MOST_PLACES} more (--format concise lists all)")
    show_table(table)

    patch = diff(first.edits, sources)
    if patch:
        console.print(colored(patch, "  "), soft_wrap=True)
    console.print()


def _place_and_code(finding: Finding, sources: Sources) -> Text:
    """Return `train.py:41 dist.barrier()`. If the finding names a rank or has no line, return its
    place and reason."""
    code = (sources.line(finding.file, finding.line) or "").strip()
    code = code if finding.rank is None else ""
    return Text.assemble(_place(finding), "  ", (code, "dim") if code else finding.why)


def say_finding(finding: Finding) -> None:
    errors.print(
        Text.assemble("paralab doctor: ", _headline(finding), ". ", finding.why), soft_wrap=True
    )


def print_fixes(fixes: Fixes) -> None:
    for file, patch in fixes.changed.items():
        console.print(Text.assemble(("changed ", "bold green"), file), soft_wrap=True)
        console.print(colored(patch), soft_wrap=True)
    if not fixes.changed:
        console.print("--fix changed nothing.")
    places: dict[tuple[str, str], list[str]] = {}
    for each in fixes.left:
        where = places.setdefault((each.finding.id, each.reason), [])
        where.append(_place(each.finding) or "no line")
    for (id, reason), where in places.items():
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        line = f"{id} at {', '.join(where[:3])}{more}: {reason}"
        _print(Text.assemble(("left ", "yellow"), line))
    console.print()


def colored(patch: str, indent: str = "") -> Text:
    text = Text()
    for line in patch.splitlines():
        style = "bold" if line.startswith(("---", "+++")) else DIFF_STYLES.get(line[:1], "")
        text.append(f"{indent}{line}\n", style=style)
    text.right_crop(1)
    return text


def _headline(finding: Finding) -> Text:
    place = _place(finding)
    return Text.assemble(
        (finding.severity, STYLES[finding.severity]),
        " ",
        (finding.id, "bold"),
        f" {finding.title}" if finding.title else "",
        *(("  ", (place, "underline")) if place else ()),
    )


def _place(finding: Finding) -> str:
    """Return `train.py:41, rank 1`."""
    line = f":{finding.line}" if finding.line else ""
    parts = [f"{shown_path(finding.file)}{line}"] if finding.file else []
    parts += [f"rank {finding.rank}"] if finding.rank is not None else []
    return ", ".join(parts)


def _context(finding: Finding, sources: Sources) -> list[Text]:
    if sources.line(finding.file, finding.line) is None:
        return []
    assert finding.file
    assert finding.line
    lines = sources.lines(finding.file)
    shown = range(max(1, finding.line - AROUND), min(len(lines), finding.line + AROUND) + 1)
    width = len(str(shown[-1]))
    context = []
    for number in shown:
        mark, style = (">", "") if number == finding.line else (" ", "dim")
        line = f"  {mark} {number:>{width}} | {lines[number - 1]}"
        context.append(Text(line.rstrip(), style))
    return context
