"""In which order passes run: every micro-batch forwards and backwards, or all forwards first and
the backwards after them."""

from __future__ import annotations

from paralab.doctor.script.values import Call, Happening, Loop


def own_loop(one: Happening, other: Happening) -> Loop | None:
    """The innermost loop around the one that is not around the other."""
    return next((loop for loop in one.inside(Loop) if loop not in other.context), None)


def loops_apart(forward: Call, backward: Call) -> tuple[Loop, Loop] | None:
    """A loop of forwards, and after it a loop of their backwards."""
    first, second = own_loop(forward, backward), own_loop(backward, forward)
    return (first, second) if first and second and forward.number < backward.number else None
