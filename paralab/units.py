"""Format seconds, bytes, counts, and other numbers as text. No other module formats them."""

import re
from collections.abc import Sequence


def seconds(value: float | None) -> str:
    """`0.0463` -> `46.3 ms`. An unknown value is `not measured`."""
    if value is None:
        return "not measured"
    factor, unit = time_unit(value)
    digits = ".3g" if value * factor < 100 else ".0f"
    return f"{value * factor:{digits}} {unit}"


def age(value: float) -> str:
    """Format a time in one rough unit: `200` -> `3 min`."""
    for factor, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= factor:
            return f"{value / factor:.0f} {unit}"
    return f"{value:.0f} s"


def time_unit(value: float) -> tuple[float, str]:
    """Return the unit for a time and the factor to convert seconds: `0.05` -> `(1000.0, "ms")`."""
    value = abs(value)
    return (1.0, "s") if value >= 1 else (1e3, "ms") if value * 1e3 >= 1 else (1e6, "µs")


def size(value: float | None) -> str:
    """`26214400` -> `25.0 MiB`. An unknown value is `not measured`."""
    if value is None:
        return "not measured"
    factor, unit = size_unit(value)
    return f"{value:.0f} B" if unit == "B" else f"{value * factor:.1f} {unit}"


def parse_size(text: str) -> int | None:
    """`16GB` -> 16000000000, `80 GiB` -> 85899345920. Return None if it is not a size."""
    match = re.fullmatch(r"([0-9.]+) ?([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if not match or match[1].count(".") > 1 or match[1] == ".":
        return None
    power = " KMGT".index(match[2].upper() or " ")
    return round(float(match[1]) * (1024 if match[3] else 1000) ** power) or None


def size_unit(value: float) -> tuple[float, str]:
    """Return the unit for a size and the factor to convert bytes: `2048` -> `(1 / 1024, "KiB")`."""
    power = next((power for power in range(4) if value < 1024 ** (power + 1)), 4)
    return 1024.0**-power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def count(value: float) -> str:
    """`123100000` -> `123.1 M`, for parameters and FLOP/s."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f}"


def difference(value: float, digits: int = 1) -> str:
    """Format a difference that is usually tiny: `2.2e-16`, but `0` instead of `0.0e+00`."""
    return f"{value:.{digits}e}" if value else "0"


def rate(value: float | None) -> str:
    """Format samples per second with three digits, because measurements are not more precise than
    that."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def whole_percents(shares: Sequence[float]) -> list[int]:
    """Round shares of a whole so that the percentages add up to 100: `[1/3, 1/3, 1/3]` ->
    `[34, 33, 33]`."""
    exact = [100 * share for share in shares]
    rounded = [int(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda n: rounded[n] - exact[n])
    for n in by_rest[: round(sum(exact)) - sum(rounded)]:
        rounded[n] += 1
    return rounded


def plural(number: float, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 micro-batches`, `2 entries`, `0.5 slots`."""
    shown = str(number) if isinstance(number, int) else f"{number:g}"
    if number == 1:
        return f"{shown} {noun}"
    if noun.endswith("y"):
        return f"{shown} {noun[:-1]}ies"
    return f"{shown} {noun}es" if noun.endswith(("s", "ch")) else f"{shown} {noun}s"


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
        return f"{value * 100:.3g}%"
    shown = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if unit == "×" and abs(value) < 100:  # ratios of measured times
        shown = f"{value:.3g}"
    if unit in ("number", "×"):
        return shown + unit.removeprefix("number")
    unit = unit.removesuffix("s") if shown == "1" else unit
    return f"{shown} {unit}".rstrip()
