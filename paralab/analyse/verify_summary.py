"""A proof in words: what `verify` prints and `show` reads."""

from __future__ import annotations

from typing import Any

from paralab.analyse.verify import aside
from paralab.units import plural


def verdict_of(case: dict[str, Any]) -> str:
    if not case["equal"]:
        return "WRONG"
    return f"equal apart from {reason}" if (reason := aside(case)) else "equal"


def size_of(difference: float | None) -> str:
    return "–" if difference is None else f"{difference:.1e}"


def headline(proof: dict[str, Any]) -> str:
    """`48 of 54 cases train like one device …; 6 were not run`: nothing is left out of the
    count."""
    cases, skipped = proof["cases"], proof["skipped"]
    equal = [case for case in cases if case["equal"]]
    apart = [case for case in equal if aside(case)]
    first = cases[0]
    text = f"{len(equal)} of {len(cases) + len(skipped)} cases train like one device over {plural(proof['steps'], 'step')} "
    text += f"({proof['precision']}, {first['measure']} within {first['tolerance']:g})"
    if apart:
        text += f"; {len(apart)} of these only with a known difference held fixed (see below)"
    if len(equal) < len(cases):
        text += f"; {len(cases) - len(equal)} WRONG"
    return text + (f"; {len(skipped)} not run" if skipped else "")


def left_out(proof: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(strategies, how many cases, why) of what was not run: the same reason is told once."""
    by_reason: dict[str, list[str]] = {}
    for case in proof["skipped"]:
        by_reason.setdefault(case["reason"], []).append(_named(case))
    return [
        (", ".join(dict.fromkeys(names)), len(names), reason) for reason, names in by_reason.items()
    ]


def _named(case: dict[str, Any]) -> str:
    strategy: str = case["strategy"]
    schedule = case["options"].get("schedule")
    return strategy + (f" --schedule {schedule}" if schedule else "")


def differing_buffers(case: dict[str, Any]) -> dict[str, float]:
    """Buffers that do not end as on one device, with the size of the difference."""
    found: dict[str, float] = (case.get("excused") or case).get("buffers", {})
    return found
