"""Format numbers for use in a sentence: speed-ups with their intervals, shares, and lists."""

from collections.abc import Iterable

from paralab.analyse.compare import Comparison, Row
from paralab.analyse.confidence import SpeedUp
from paralab.analyse.result import NOT_FASTER, Compilation, Result, Spread
from paralab.units import plural, seconds


def machine_words(comparison: Comparison) -> str:
    """Describe the hardware: `1 GPU (NVIDIA H200)`, `2 cores of AMD EPYC`, or both."""
    machine, used = comparison.machine, {row.device for row in comparison.rows}
    words = []
    if machine.gpus and (used & {"cuda", "auto"} or not used):
        words.append(f"{plural(len(machine.gpus), 'GPU')} ({machine.gpus[0].name})")
    if "cpu" in used or not words:
        words.append(f"{plural(machine.cores, 'core')} of {machine.cpu}")
    return " and ".join(words)


def factor(value: float) -> str:
    """`1.87`, `0.66`, `0.057`."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def interval(speed: SpeedUp) -> str:
    """`1.80–1.95`; empty if there were too few rounds."""
    if speed.low is None or speed.high is None:
        return ""
    return f"{factor(speed.low)}–{factor(speed.high)}"


def times_as_fast(speed: SpeedUp, other: str | None = None) -> str:
    """`1.93 times as fast (1.88–1.99)`, or `1.93 times as fast as single (1.88–1.99)`."""
    limits = f" ({interval(speed)})" if interval(speed) else ""
    return f"{factor(speed.value)} times as fast{f' as `{other}`' if other else ''}{limits}"


def share(value: float | None) -> str:
    """`0.1288` -> `13%`, `0.0661` -> `6.6%`."""
    if value is None:
        return "not measured"
    if 0.99 < value < 1:
        return f"{value * 100:.3g}%"  # do not round 99.5% up to 100%
    return f"{value * 100:.0f}%" if value >= 0.0995 or value == 0 else f"{value * 100:.2g}%"


def collectives_per_step(row: Row | Result) -> str:
    """`2 all-reduces`; `7 all-gathers and 4 reduce-scatters`; empty for one process."""
    counts = {
        "all-reduce": row.all_reduces_per_step,
        "all-gather": row.all_gathers_per_step,
        "reduce-scatter": row.reduce_scatters_per_step,
        "all-to-all": row.all_to_alls_per_step,
        "broadcast": row.broadcasts_per_step,
    }
    # With local-sgd, there may be less than one per step. Print 0.667 rather than 0.666667.
    rounded = {name: float(f"{count:.3g}") for name, count in counts.items() if count}
    return listed([plural(count, name) for name, count in rounded.items()])


def compile_cost(made: Compilation) -> str:
    """`the first step took 5.4 s, 5.3 s more than later steps; pays off after 120 steps`."""
    text = f"compiled {plural(made.graphs, 'graph')}; the first step took "
    text += seconds(made.first_step_seconds)
    if made.extra_seconds is not None:
        text += f", {seconds(made.extra_seconds)} more than a later step"
    if made.break_even_steps is not None:
        text += f"; this pays off after {plural(made.break_even_steps, 'step')}"
    elif made.unknown == NOT_FASTER:
        text += f"; this does not pay off: {made.unknown}"
    else:
        text += f"; when this pays off is unknown: {made.unknown}"
    if made.eager_calls:
        text += f"; {made.eager_calls} of {plural(made.calls, 'call')} ran without compiled code"
    return text


def spread(times: Spread) -> str:
    """`34.6 ms (p10–p90: 34.4 ms–35.0 ms)`."""
    return f"{seconds(times.median)} (p10–p90: {seconds(times.p10)}–{seconds(times.p90)})"


def listed(words: Iterable[object]) -> str:
    """`a`, `a and b`, or `a, b, and c`."""
    *head, tail = [str(word) for word in words] or [""]
    return f"{', '.join(head)}{',' * (len(head) > 1)} and {tail}" if head else tail


def slashes(sizes: Iterable[int]) -> str:
    """`22/22/20`."""
    return "/".join(map(str, sizes))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def uncapital(text: str) -> str:
    return text[:1].lower() + text[1:]
