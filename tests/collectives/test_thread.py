"""The thread that runs a group's collectives in order."""

import threading

import torch

from paralab.collectives.thread import OrderedThread
from paralab.workload.hooks import Intercepting
from tests.conftest import wait_until


def test_a_callback_may_wait_for_another_collective():
    """torch's PowerSGD hook waits for a second all-reduce in the callback of the first. One thread
    had to run both the callback and the all-reduce, so DDP hung forever."""
    thread = OrderedThread("test", lambda _: None)
    registered = threading.Event()
    first = thread.submit(registered.wait, {})
    last = first.get_future().then(
        lambda _: thread.submit(lambda: "second", {}).get_future().wait()
    )
    registered.set()
    wait_until(last.done)
    assert last.value() == "second"
    assert thread.submit(lambda: "third", {}).result() == "third"
    assert thread.close(10)


def test_the_callers_modes_do_not_see_a_collective_in_its_own_thread():
    """Selective recomputation counts operators. It counted copies of a collective that ran in the
    caller's thread, and then missed them when the collective ran in our own thread."""
    thread, seen = OrderedThread("test", lambda _: None), []

    def note(func, args, kwargs):
        seen.append(func)
        return func(*args, **kwargs)

    with Intercepting(note):
        work = thread.submit(lambda: torch.ones(2).neg(), {}, caller_waits=True)
    assert work.is_completed()
    assert seen == []
    assert thread.close(10)
