"""Ask a question in child processes that import torch, and wait for the answer. This process never
imports torch. `paralab.worker.inspection.answers` is the other side."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from paralab.launch.launched_by import without_launch
from paralab.launch.processes import INSIDE, Child, start
from paralab.machine.host import FULL_BYTES

POLL_SECONDS = 0.02
KILLED_SECONDS = 60  # how long to wait for a killed process to exit


class Answer(NamedTuple):
    """`value` is None if the processes wrote no answer. `code` is the exit code of the process that
    failed, or 0, or None if the deadline passed first."""

    value: Any
    code: int | None
    output: str


def ask(
    module: str,
    question: Any,
    deadline_seconds: float,
    inside: str,
    processes: Sequence[Mapping[str, str]] = ({},),
) -> Answer:
    """Start the processes, each with its own environment variables, and wait for their answer."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        path, asked, log = (Path(folder, n) for n in ("answer.json", "question.json", "log.txt"))
        asked.write_text(json.dumps(question))
        environment = {**without_launch(os.environ), INSIDE: inside}
        children: list[Child] = []
        with ExitStack() as ending, log.open("wb") as file:
            for own in processes:
                child = start(module, [str(path), str(asked)], {**environment, **own}, file)
                ending.callback(_end, child)
                children.append(child)
            code = _wait(children, deadline_seconds)

        output = log.read_text(errors="replace").strip()
        if code is not None and path.exists():
            return Answer(json.loads(path.read_text()), code, output)
        if code is not None and shutil.disk_usage(folder).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        return Answer(None, code, output)


def _wait(children: Sequence[Child], deadline_seconds: float) -> int | None:
    """Wait until all processes have exited or one has failed."""
    until = time.monotonic() + deadline_seconds
    while time.monotonic() < until:
        codes = [child.poll() for child in children]
        if failed := next((code for code in codes if code), None):
            return failed
        if None not in codes:
            return 0
        time.sleep(POLL_SECONDS)
    return None


def _end(child: Child) -> None:
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # it may be waiting for a broken disk
        child.wait(KILLED_SECONDS)
    if child.stdin:
        child.stdin.close()
