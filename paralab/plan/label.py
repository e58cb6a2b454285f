"""A configuration's label: its name in every table, page, and folder."""

from __future__ import annotations

from paralab.plan.option import options_of
from paralab.plan.plan import Plan
from paralab.plan.request import Request


def label(configuration: Request | Plan) -> str:
    """Label a configuration with its distinctive options: `hybrid ×2 · 2 stages · bf16`.

    Leaves out options that were not given or have their usual value. A plan has a value for each
    option, so its label also names automatic choices.
    """
    words = [configuration.strategy]
    for each in options_of(Request):
        if each.label is None or not each.applies_to(configuration.strategy):
            continue

        given = getattr(configuration, each.name)
        value = each.usual if given is None else given
        if value in (None, False) or (value == each.usual and not each.always):
            continue

        words.append(each.label(value))
    return " · ".join(words).replace(" · ×", " ×")
