"""The thread that runs a group's collectives in order."""

import threading

from paralab.collectives.thread import OrderedThread
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
