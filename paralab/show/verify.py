"""Show the result of `verify`: on a page, and in the terminal."""

from pathlib import Path

from rich.markup import escape

from paralab.analyse.blocks import Cell, Document, Finding, Section
from paralab.analyse.table_cells import Cells, exact, name, number, table
from paralab.analyse.verify import Verified, VerifyResult, headline, outcome, skipped_by_reason
from paralab.errors import UsageError
from paralab.plan.option import options_of
from paralab.plan.request import Request
from paralab.record.types import convert, read_object
from paralab.show.console import console, print_table, say
from paralab.units import difference, plural


def document_of(folder: Path) -> Document:
    path = folder / "result.json"
    if not path.exists():
        raise UsageError(f"verify in {folder} did not finish.", fix="run paralab verify again")
    result = convert(read_object(path), VerifyResult, path)
    ran = result.configurations
    evidence = {
        "equal": sum(each.equal for each in ran),
        "as_simulated": sum(each.as_simulated is True for each in ran),
        "of": len(ran),
        "skipped": len(result.skipped),
    }
    finding = Finding("same", headline(result), evidence)
    skipped: list[Cells] = [
        {"strategy": name(names), "configurations": exact(count), "why": name(reason)}
        for names, count, reason in skipped_by_reason(result)
    ]
    hidden = _repeated(result)
    rows = ({k: v for k, v in _row(each).items() if k not in hidden} for each in ran)
    sections = [Section("Configurations", (table("", rows, "; ".join(_reasons(result))),))]
    sections += [Section("Not run", (table("", skipped),))] if skipped else []
    title, subtitle = "Verify: parallel equals serial", ", ".join(result.workloads)
    return Document(title, subtitle, (finding,), tuple(sections))


def print_verify(result: VerifyResult) -> None:
    """Print one line per configuration, without columns that only repeat others, and the verdict."""
    hidden = {"workload", "why", *_repeated(result)}
    for workload in result.workloads:
        own = [_row(each) for each in result.configurations if each.options.workload == workload]
        say(f"[bold]{escape(workload)}[/]")
        columns = [column for column in (own[0] if own else ()) if column not in hidden]
        rows = ([_colored(row[column]) for column in columns] for row in own)
        print_table(columns, rows, right=("difference", "as requested"))
    for names, count, reason in skipped_by_reason(result):
        say(f"[yellow]not run:[/] {names}, {plural(count, 'configuration')}: {escape(reason)}")
    say(escape(headline(result)))
    for line in _reasons(result):
        say(escape(line), indent=2)
    console.print(f"{result.seconds:.1f} s, run folder {escape(result.run_folder)}", style="dim")


def _repeated(result: VerifyResult) -> set[str]:
    """Return the columns that only repeat others, or the title."""
    ran = result.configurations
    hidden = {"workload"} if len(result.workloads) < 2 else set()
    hidden |= set() if any(each.excused for each in ran) else {"as requested"}
    return hidden if any(each.excused or each.cause for each in ran) else {*hidden, "why"}


def _colored(cell: Cell) -> str:
    text = escape(cell.text)
    return (
        f"[{'green' if cell.value else 'red'}]{text}[/]" if isinstance(cell.value, bool) else text
    )


def _row(each: Verified) -> Cells:
    ways = each.options.ways
    words = [
        option.label(ways[option.name])
        for option in options_of(Request)
        if option.label and option.name in ways
    ]
    reasons = each.excused.reasons if each.excused else []
    return {
        "workload": name(each.options.workload),
        "strategy": name(" · ".join([each.strategy, *words])),
        "batch": name(each.arithmetic),
        "last batch": name("partial" if each.options.partial_last_batch else "full"),
        "difference": number(each.max_difference, difference, "–"),
        "outcome": Cell(outcome(each), each.passed),
        "as requested": number((each.excused or each).max_difference, difference, "–"),
        "why": name(each.cause or "; ".join(reasons) or "–"),
    }


def _reasons(result: VerifyResult) -> list[str]:
    """List each reason once: why configurations differ, and what was held fixed."""
    lines = [
        f"{'differs' if each.ran else 'failed'}: {each.cause}"
        for each in result.configurations
        if each.cause
    ]
    if any(each.as_simulated for each in result.configurations):
        lines.append(
            "as simulated: equal to the same algorithm on one device, but not to plain training; "
            "'as requested' shows how far the weights differ"
        )
    if result.dropout != "none":
        lines.append(f"dropout was {result.dropout}: splitting the work changes its random numbers")
    largest: dict[str, float] = {}
    for each in result.configurations:
        reasons = each.excused.reasons if each.excused else []
        if each.as_simulated is not None and reasons:
            lines.append(f"lossy: {reasons[0]}")
            reasons = reasons[1:]
        lines += [f"held fixed: {why}" for why in reasons]
        for buffer, size in (each.excused or each).buffers.items():
            largest[buffer] = max(largest.get(buffer, 0.0), float("inf") if size is None else size)
    for buffer, size in largest.items():
        lines.append(f"buffer {buffer} differs from a single device's by up to {size:.2g}")
    steps = plural(result.steps, "step")
    for workload, names in result.state.items():
        lines.append(
            f"stateful forward: {workload} changes {', '.join(names)} in each call, so it may "
            f"behave differently after the {steps} checked here (--steps N checks more)"
        )
    return list(dict.fromkeys(lines))
