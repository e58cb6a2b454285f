"""Corpus scripts under observation, fast: the ranks are forked from the process that has torch."""

import time

from paralab.doctor.events import Backward, Collective
from paralab.doctor.watch import observe
from tests import forked


def observed(
    script, *arguments, folder, stall_seconds=1.0, steps=None, deadline=100.0, count=2, **more
):
    """What `observe` returns for a script on two ranks; `count=0`: one process, no launcher."""
    began = time.monotonic()
    result = observe(
        [*forked.python(count), str(script), *map(str, arguments)],
        steps=steps,
        stall_seconds=stall_seconds,
        folder=folder,
        end_when_hung=True,
        **more,
    )
    assert time.monotonic() - began < deadline
    return result


def waited_in(rank):
    """The operation in which it hung: open still, or raised when the ranks were ended one after the
    other."""
    return max(
        (
            event
            for event in (*rank.story, *rank.doing)
            if isinstance(event, (Backward, Collective))
        ),
        key=lambda event: event.t,
    )
