"""Print the `verify` result in the terminal: one line per configuration, and the verdict."""

from rich.markup import escape

from paralab.analyse.verify import Verified, VerifyResult, headline, outcome, skipped_by_reason
from paralab.show.console import console, print_table, say
from paralab.units import plural


def print_verify(result: VerifyResult) -> None:
    excuses = any(each.excused for each in result.configurations)
    columns = ("strategy", "batch", "last batch", "difference", "outcome", "as requested")
    end = None if excuses else -1  # omit the last column if it only repeats the others
    for workload in result.workloads:
        own = [each for each in result.configurations if each.options.workload == workload]
        say(f"[bold]{escape(workload)}[/]")
        rows = (_row(each)[:end] for each in own)
        print_table(columns[:end], rows, right=("difference", "as requested"))
    for names, number, reason in skipped_by_reason(result):
        count = plural(number, "configuration")
        say(f"[yellow]not run:[/] {names}, {count}: {escape(reason)}")
    say(escape(headline(result)))
    for line in _reasons(result):
        say(f"  {escape(line)}")
    console.print(f"{result.seconds:.1f} s, run folder {escape(result.run_folder)}", style="dim")


def _row(each: Verified) -> tuple[str, ...]:
    schedule = f" · {each.options.schedule}" if each.options.schedule else ""
    largest = (each.max_difference, (each.excused or each).max_difference)
    difference, asked = ("–" if value is None else f"{value:.1e}" for value in largest)
    last = "partial" if each.options.partial_last_batch else "full"
    how = f"[{'green' if each.equal else 'red'}]{outcome(each)}[/]"
    return (each.strategy + schedule, each.arithmetic, last, difference, how, asked)


def _reasons(result: VerifyResult) -> list[str]:
    """List each reason once: why configurations differ, and what was held fixed."""
    found = [f"differs: {each.cause}" for each in result.configurations if each.cause]
    if result.dropout != "none":
        found.append(f"dropout was {result.dropout}: splitting the work changes its random numbers")
    largest: dict[str, float] = {}
    for each in result.configurations:
        found += [f"held fixed: {why}" for why in (each.excused.reasons if each.excused else [])]
        for name, size in (each.excused or each).buffers.items():
            largest[name] = max(largest.get(name, 0.0), float("inf") if size is None else size)
    for name, size in largest.items():
        found.append(f"buffer {name} differs from a single device's by up to {size:.2g}")
    steps = plural(result.steps, "step")
    for workload, names in result.state.items():
        found.append(
            f"stateful forward: {workload} changes {', '.join(names)} in each call, and may "
            f"behave differently after the {steps} checked here (--steps N checks more)"
        )
    return list(dict.fromkeys(found))
