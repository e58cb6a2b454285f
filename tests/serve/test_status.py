"""A run's status follows from its end events, or else from its processes."""

import os
import subprocess
import sys
import time

import pytest

from paralab.record.events import End, Start
from paralab.serve.status import GRACE_SECONDS, SILENT_SECONDS, is_running, status_of


def start(pid=1, **fields):
    event = {"event": "start", "time": 0.0, "pid": pid, "devices": ["cpu:0"]}
    return Start(**(event | {"unix_seconds": time.time()} | fields))


def ended(status):
    return End(event="end", time=1.0, status=status)


ALIVE, GONE, ELSEWHERE = True, False, None
LONG = SILENT_SECONDS + 1


@pytest.mark.parametrize(
    ("ranks", "ends", "silent", "has_result", "expected"),
    [
        ([], [], 1, False, "starting"),
        ([], [], LONG, False, "not started"),
        ([ALIVE, ALIVE], [], 1, False, "running"),
        ([ALIVE, ALIVE], [], LONG, False, "running"),  # a hang, not an end
        ([ALIVE, GONE], [], LONG, False, "running"),  # one rank is left
        ([GONE, GONE], [], 1, False, "running"),  # the end event may be on its way
        ([GONE, GONE], [], GRACE_SECONDS + 1, False, "killed"),
        ([ELSEWHERE, ELSEWHERE], [], GRACE_SECONDS + 1, False, "running"),
        ([ELSEWHERE, ELSEWHERE], [], LONG, False, "silent"),
        ([GONE, GONE], ["completed", "completed"], 0, False, "completed"),
        ([ALIVE, ALIVE], ["completed", "completed"], 0, False, "completed"),  # a shared launch
        ([GONE, GONE], ["completed"], GRACE_SECONDS + 1, False, "killed"),
        ([GONE, GONE], ["stopped", "stopped"], 0, False, "stopped"),
        ([GONE, GONE], ["failed"], 1, False, "running"),  # it may restart
        ([GONE, GONE], ["failed"], 1, True, "failed"),  # the launcher has given up
        ([GONE, GONE], ["failed"], GRACE_SECONDS + 1, False, "failed"),
        ([ELSEWHERE, ELSEWHERE], ["failed"], LONG, False, "failed"),
        ([GONE, GONE], ["interrupted", "interrupted"], 1, True, "interrupted"),
    ],
)
def test_the_status(ranks, ends, silent, has_result, expected):
    assert status_of(ranks, [ended(each) for each in ends], 2, silent, has_result) == expected


def test_this_process_is_running():
    assert is_running(start(os.getpid())) is True


def test_a_younger_process_with_the_same_number_is_another_one():
    assert is_running(start(os.getpid(), unix_seconds=1e9)) is False


def test_a_process_on_another_machine_cannot_be_seen():
    assert is_running(start(os.getpid(), node="another-machine")) is None


@pytest.mark.processes
def test_a_process_that_ended_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert is_running(start(process.pid)) is False
