"""Determine a run's status from its ranks' end events or, without them, from whether their
processes still exist.

A killed run does not write an end event, so a missing one does not mean that the run is still
training.
"""

import socket
from collections.abc import Collection, Sequence
from typing import Literal

import psutil

from paralab.record.events import End, Start
from paralab.record.reader import RunStatus, read_status

# `starting`: no rank has started yet. `not started`: none has started within a minute. `silent`:
# the ranks are on another machine and have not written an event for a minute.
Status = Literal["starting", "not started", "running", "silent", "damaged"] | RunStatus
IS_OVER: tuple[Status, ...] = ("completed", "stopped", "failed", "interrupted")

# After the ranks exit, the launcher writes result.json or restarts them.
GRACE_SECONDS = 8.0
SILENT_SECONDS = 60.0
CLOCK_SECONDS = 2.0  # a process may appear to start this long after its start event


def is_running(start: Start) -> bool | None:
    """Return whether the rank's process exists, or None if it runs on another machine. A process
    that started after the event is a different one with the same id."""
    if start.node and start.node.partition(".")[0] != socket.gethostname().partition(".")[0]:
        return None
    try:
        process = psutil.Process(start.pid)
        is_same = process.create_time() <= start.unix_seconds + CLOCK_SECONDS
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None


def status_of(
    running: Collection[bool | None],
    ends: Sequence[End],
    world_size: int,
    silent_seconds: float,
    has_result: bool,
) -> Status:
    """Return a run's status. `running` has `is_running` of each rank that started. `silent_seconds`
    is the time since the last event. `has_result` is True once the launcher has written
    result.json, which it does last."""
    written = read_status({number: [end] for number, end in enumerate(ends)}, world_size)
    if has_result or (len(ends) == world_size and written in ("completed", "stopped")):
        return written
    if not running:
        return "starting" if silent_seconds < SILENT_SECONDS else "not started"
    # Failed ranks may be restarted, and we cannot see ranks on other machines.
    if True in running or silent_seconds < (SILENT_SECONDS if None in running else GRACE_SECONDS):
        return "running"
    return "silent" if None in running and not ends else written
