"""A diagnosis in the terminal: every finding with its line, its reason here, its fix and its patch;
then one line for all."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.finding import Finding
from paralab.doctor.patch import Fixes, diff, shown_path
from paralab.doctor.report import Diagnosis
from paralab.doctor.show.preflight import print_looked
from paralab.doctor.sources import Sources
from paralab.show.console import console, errors, fact_table, show_table
from paralab.units import plural

STYLES = {"error": "bold red", "warning": "bold yellow", "suspect": "bold cyan"}
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}
AROUND = 2  # lines shown before and after the one that is meant


def print_diagnosis(diagnosis: Diagnosis) -> None:
    print_looked(diagnosis.facts)
    for finding in diagnosis.findings:
        print_finding(finding, diagnosis.sources)
    for note in diagnosis.notes:
        console.print(Text.assemble(("note ", "dim"), note), soft_wrap=True)
    console.print(_closing(diagnosis), soft_wrap=True)


def _closing(diagnosis: Diagnosis) -> Text:
    silenced = (
        f" ({plural(len(diagnosis.ignored), 'finding')} silenced by comments)"
        if diagnosis.ignored
        else ""
    )
    if diagnosis.findings:
        first = diagnosis.findings[0].id
        return Text(f"{diagnosis.counted()}{silenced}; paralab doctor --explain {first} tells more")
    return Text.assemble(
        ("nothing found", "bold green" if not diagnosis.command_exit_code else "bold"),
        f"{silenced} in {diagnosis.subject}. Looked at: {diagnosis.looked_at}. Not looked at: {diagnosis.not_looked_at}.",
    )


def print_finding(finding: Finding, sources: Sources) -> None:
    console.print(_headline(finding), soft_wrap=True)
    context = _context(finding, sources)
    for line in context:
        console.print(line, soft_wrap=True, crop=False)
    table = fact_table()
    table.add_row("  why", Text(finding.why))
    table.add_row("  fix", Text(finding.fix))
    own = (
        f"{Path(finding.file).name}:{finding.line}:" if finding.file and context else None
    )  # the line that stands above
    for evidence in (
        evidence for evidence in finding.evidence if not (own and evidence.startswith(own))
    ):
        table.add_row("  seen", Text(evidence))
    if finding.gain:
        table.add_row("  gain", f"{finding.gain:.0%} of the step")
    show_table(table)
    patch = diff(finding.edits, sources)
    if patch:
        console.print(coloured(patch, "  "), soft_wrap=True)
    console.print()


def say_finding(finding: Finding) -> None:
    """While the job still runs: one line, above what it prints itself."""
    errors.print(
        Text.assemble("paralab doctor: ", _headline(finding), ". ", finding.why), soft_wrap=True
    )


def print_fixes(fixes: Fixes) -> None:
    for file, patch in fixes.changed.items():
        console.print(Text.assemble(("changed ", "bold green"), file), soft_wrap=True)
        console.print(coloured(patch), soft_wrap=True)
    for left in fixes.left:
        console.print(Text.assemble(("not changed ", "dim"), left), soft_wrap=True)
    if not fixes.changed:
        console.print("No file was changed: no finding has a patch that is safe to apply.")
    console.print()


def coloured(patch: str, indent: str = "") -> Text:
    """A unified diff; what is no text of ours is never taken for markup."""
    text = Text()
    for line in patch.splitlines():
        style = "bold" if line.startswith(("---", "+++")) else DIFF_STYLES.get(line[:1], "")
        text.append(f"{indent}{line}\n", style=style)
    text.right_crop(1)
    return text


def _headline(finding: Finding) -> Text:
    known = ENTRIES.get(finding.id)
    place = (
        [f"{shown_path(finding.file)}{f':{finding.line}' if finding.line else ''}"]
        if finding.file
        else []
    )
    place += [f"rank {finding.rank}"] if finding.rank is not None else []
    return Text.assemble(
        (finding.severity, STYLES[finding.severity]),
        " ",
        (finding.id, "bold"),
        f" {known.title}" if known else "",
        *(("  " + ", ".join(place), "underline") if place else "",),
    )


def _context(finding: Finding, sources: Sources) -> list[Text]:
    if sources.line(finding.file, finding.line) is None:
        return []
    assert finding.file
    assert finding.line
    lines = sources.lines(finding.file)
    shown = range(max(1, finding.line - AROUND), min(len(lines), finding.line + AROUND) + 1)
    width = len(str(shown[-1]))
    return [
        Text(
            f"  {'>' if number == finding.line else ' '} {number:>{width}} | {lines[number - 1]}".rstrip()
        )
        if number == finding.line
        else Text(f"    {number:>{width}} | {lines[number - 1]}".rstrip(), style="dim")
        for number in shown
    ]
