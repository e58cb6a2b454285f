"""Show a plan's memory estimate in the terminal."""

from rich.markup import escape

from paralab.plan.memory_trial import Fit
from paralab.plan.plan import Plan
from paralab.show.console import console, print_table, say
from paralab.units import plural, size

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "unreduced")
NOTE = (
    "Memory: estimated with fake tensors. sum: the columns added up, each at its own maximum, as "
    "in a run on CPU cores. peak: the maximum at any one time, including buckets, buffers, the "
    "batch, and temporary tensors. staging: the most that the backend local adds to the peak."
)


def print_memory(plan: Plan) -> None:
    """Print one line per device, and whether it fits."""
    memory = plan.memory
    if memory is None:
        return
    console.print()
    if memory.not_estimated:
        say(f"[yellow]memory not estimated:[/] {escape(memory.not_estimated)}")
        return
    columns = [*KINDS, "counted", "buckets", "peak", "staging"]
    columns = [name for name in columns if any(getattr(each, name) for each in memory.devices)]
    rows = ([_cell(getattr(each, name)) for name in columns] for each in memory.devices)
    heading = ["sum" if name == "counted" else name for name in columns]
    named = ([str(e.rank), e.device, *row] for e, row in zip(memory.devices, rows, strict=True))
    print_table(["rank", "device", *heading], named, ["rank", *heading])
    console.print(NOTE, style="dim")
    for note in memory.notes:
        say(f"[yellow]note:[/] {escape(note)}")
    if memory.no_peak:
        say(f"[yellow]peak not estimated:[/] {escape(memory.no_peak)}")
    if memory.fit:
        say(_sentence(memory.fit, plan.samples))


def _cell(value: int | None) -> str:
    return "–" if value is None else size(value)


def _sentence(fit: Fit, samples: int | None) -> str:
    """`fits: 76.5 MiB of 14.9 GiB (0.5%); the largest batch size that fits is 8192 (14.9 GiB)`."""
    verdict = "[green]fits[/]" if fit.fits else "[red]does not fit[/]"
    percent = 100 * fit.needed / fit.bytes
    share = (
        "<0.01%" if percent < 0.01 else f"{percent:.3g}%" if percent < 100 else f"{percent:,.0f}%"
    )
    largest = fit.no_largest
    if fit.largest_batch_size is not None:
        largest = f"the largest batch size that fits is {fit.largest_batch_size:,} "
        largest += f"({size(fit.largest_batch_bytes)})"
        if samples is not None and fit.largest_batch_size > samples:
            largest += f"; an epoch has only {plural(samples, 'sample')}"
    return f"{verdict}: {size(fit.needed)} of {size(fit.bytes)} ({share}); {largest}"
