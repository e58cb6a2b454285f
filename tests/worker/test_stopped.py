"""How a rank ends when the launcher stops all ranks. CI once reported an interrupted run as
failed, because rank 1 lost its connection to the stopped rank 0 before its own order arrived."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from paralab.worker import __main__ as worker
from paralab.worker.measure.clock import ALIGNED

IN_CALLBACK = "Got the following error when running the callback: Stopped: <EMPTY MESSAGE>"
LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def end_of_a_rank(tmp_path, monkeypatch, message, order_after_seconds):
    """Let training raise `message`, and let the launcher's order arrive later (None: never)."""

    def fail(*arguments):
        if message == IN_CALLBACK:  # the order arrives in Python code that torch's C++ code calls
            worker._stopping.set()
            with suppress(worker.Stopped):
                worker._raise_if_stopping()
        raise RuntimeError(message)

    monkeypatch.setattr(worker, "train", fail)
    monkeypatch.setattr(worker, "_load", lambda name: None)
    monkeypatch.setattr(worker, "STOP_SECONDS", 0.2 if order_after_seconds is None else 30.0)
    here = SimpleNamespace(local_rank=0, devices=[], node=0)
    plan = SimpleNamespace(ranks=[here], workload="mlp:tiny")
    job = {"attempt": 0, "events": str(tmp_path), "checkpoints": None, "extras": {}}
    before = signal.signal(signal.SIGTERM, lambda number, frame: worker._raise_if_stopping())
    order = threading.Timer(order_after_seconds or 0.0, worker._stop)
    if order_after_seconds is not None:
        order.start()
    try:
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            worker._train_one(job, plan, 0, 0.0, ALIGNED, None)
    finally:
        order.cancel()
        signal.signal(signal.SIGTERM, before)
        signal.siginterrupt(signal.SIGTERM, False)
    events = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    return raised.type, [(event["event"], event.get("status")) for event in events[1:]]


def test_a_lost_connection_before_the_order_is_part_of_the_stop(tmp_path, monkeypatch):
    end = end_of_a_rank(tmp_path, monkeypatch, LOST, order_after_seconds=0.1)
    assert end == (worker.Stopped, [("end", "interrupted")])


def test_a_lost_connection_without_an_order_is_a_failure(tmp_path, monkeypatch):
    end = end_of_a_rank(tmp_path, monkeypatch, LOST, order_after_seconds=None)
    assert end == (RuntimeError, [("error", None), ("end", "failed")])


def test_an_error_of_the_rank_itself_does_not_wait_for_an_order(tmp_path, monkeypatch):
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: pytest.fail("it waited"))
    end = end_of_a_rank(tmp_path, monkeypatch, "a label is out of range", order_after_seconds=None)
    assert end == (RuntimeError, [("error", None), ("end", "failed")])


def test_an_order_that_arrives_in_a_callback_is_still_an_order(tmp_path, monkeypatch):
    # torch turned `Stopped` into a RuntimeError, so every third Ctrl-C was reported as a failure.
    end = end_of_a_rank(tmp_path, monkeypatch, IN_CALLBACK, order_after_seconds=None)
    assert end == (worker.Stopped, [("end", "interrupted")])
