"""Format numbers as text: seconds, bytes, counts. No other module formats them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """`0.0463` -> `46.3 ms`; unknown stays unknown."""
    if value is None:
        return "not measured"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1.0 or unit == "µs":
            digits = ".3g" if value * factor < 100 else ".0f"
            return f"{value * factor:{digits}} {unit}"
    raise AssertionError(value)


def size(value: float | None) -> str:
    """`26214400` -> `25.0 MiB`; unknown stays unknown."""
    if value is None:
        return "not measured"
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError(value)


def count(value: float) -> str:
    """`123100000` -> `123.1 M`, for parameters and FLOP/s."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """Format samples per second with three significant digits, all that a measurement supports."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plural(number: int, noun: str) -> str:
    """`plural(1, "rank")` -> `1 rank`; `plural(2, "rank")` -> `2 ranks`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}es" if noun.endswith(("s", "ch")) else f"{number} {noun}s"


def measure(value: float | None, unit: str) -> str:
    """Format a number in a chart's unit: seconds, bytes, share, number, `×`, or a suffix (`1.8 cores`)."""
    if value is None:
        return "not measured"
    if value != value or abs(value) == float("inf"):
        return "not finite"
    if unit == "seconds":
        return seconds(value)
    if unit == "bytes":
        return size(value)
    if unit == "share":
        return f"{value * 100:.3g} %"
    shown = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if unit in ("number", "×"):
        return shown + unit.removeprefix("number")
    return f"{shown} {unit}".rstrip()
