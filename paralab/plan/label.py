"""The label of a configuration: its name in every table, page, and folder."""

from __future__ import annotations

from paralab.plan.option import options_of
from paralab.plan.plan import Plan
from paralab.plan.request import Request


def label(configuration: Request | Plan) -> str:
    """What distinguishes a configuration from others: `hybrid ×2 · 2 stages · accumulate 4 · bf16`.

    Options that were not given, or have their usual value, are left out. A plan has a value for
    every option, so its label also names those that were chosen automatically.
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
