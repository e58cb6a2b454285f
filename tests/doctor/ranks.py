"""Observe corpus scripts. This is fast, because a process that has imported torch forks the
ranks."""

import time
from concurrent.futures import ThreadPoolExecutor

from paralab.doctor.events import Backward, Collective
from paralab.doctor.watch import observe
from tests import forked

STARTS = {"torchrun": 2, "python": 0}  # the number of ranks


def observed(
    script, *arguments, folder, stall_seconds=1.0, steps=None, deadline=100.0, count=2, **more
):
    """Return what `observe` returns for a script on two ranks. `count=0` means one process
    without a launcher."""
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


def observe_all(request, root, at_a_time, **options):
    """Observe the cases that a module's collected tests use, a few at a time, because many of them
    only wait."""
    items = [item for item in request.session.items if item.module is request.module]
    cases = {
        str(case): case
        for item in items
        if hasattr(item, "callspec") and (case := item.callspec.params.get("case"))
    }
    with ThreadPoolExecutor(at_a_time) as pool:
        futures = {
            name: pool.submit(
                observed, case.script, folder=root / name, count=STARTS[case.start], **options
            )
            for name, case in cases.items()
        }
    return {name: future.result() for name, future in futures.items()}


def waited_in(rank):
    """Return the operation in which the rank hung. It is still open, or it raised when the ranks
    were ended one by one."""
    return max(
        (
            event
            for event in (*rank.story, *rank.doing)
            if isinstance(event, (Backward, Collective))
        ),
        key=lambda event: event.t,
    )
