"""Micro-batches take turns. Rows are stages, columns are times, and entries are micro-batches."""

import threading
import time

import pytest

from paralab.worker.strategies.pipeline_threads import Aborted, StageOrder


def sweep(stages, micros, route):
    """Run each micro-batch through the stages in its own thread. Return which one was where at
    each time."""
    order, drawn, lock = StageOrder(stages), [[] for _ in range(stages)], threading.Lock()

    def walk(micro):
        for stage in route:
            order.enter(stage, micro)
            with lock:
                drawn[stage].append(micro)
            time.sleep(0.002)
            order.leave(stage, micro)

    # Start the threads in the wrong order on purpose. `StageOrder` must correct it.
    threads = [threading.Thread(target=walk, args=(micro,)) for micro in reversed(range(micros))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    return drawn


def test_every_stage_sees_the_micro_batches_in_order():
    assert sweep(2, 4, route=[0, 1]) == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert sweep(3, 3, route=[2, 1, 0]) == [[0, 1, 2]] * 3


def test_two_stages_work_at_the_same_time():
    order = StageOrder(2)
    order.enter(0, 0)
    order.leave(0, 0)
    order.enter(1, 0)
    order.enter(
        0, 1
    )  # micro-batch 1 is in stage 0 while 0 is in stage 1; would hang if stages excluded each other


def test_a_failure_wakes_those_that_wait():
    order, woken = StageOrder(1), []

    def wait():
        with pytest.raises(Aborted):
            order.enter(0, 5)
        woken.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    order.abort()
    thread.join(5)
    assert woken
