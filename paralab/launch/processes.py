"""Child processes with torch: ranks, and those that look at a workload.

Loading torch takes a second or two of a core, and a command needs several such processes. So within
`loading_once` one process loads it and forks the others from itself (`paralab.worker.template`).
Where that cannot be, every one is started by itself:

- elsewhere than on Linux (5.3 or newer): on macOS a process that has loaded frameworks cannot fork
  safely
- on a machine with an NVIDIA driver, which does not survive a fork once something has touched it
- with a prefix (numactl …), or with environment variables that libraries read when they are loaded
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from paralab.machine import signals
from paralab.machine.child import command
from paralab.record.status_board import UNSEEN

INSIDE = "PARALAB_INSIDE"  # set in every process that paralab starts; one of them must not start paralab again
LAUNCHER = "PARALAB_LAUNCHER"  # the number of the process that started it
SHARED = "PARALAB_TEMPLATE"  # a socket where a process with torch already listens; it serves many commands (the tests use it)
LOADING_SECONDS = 600
DRIVER = Path("/dev/nvidiactl")


class Forked:
    """A process that was forked for us, with what is used of `subprocess.Popen`."""

    def __init__(self, template: Template, pid: int, stdin: IO[bytes]) -> None:
        self.template, self.pid, self.stdin = template, pid, stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._code(0.0)

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self._code(max(0.0, until - time.monotonic()))) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _code(self, seconds: float) -> int | None:
        """How it ended, after a wait for news if that is not known."""
        if self.returncode is None:
            self.returncode = self.template.code_of(self.pid, seconds)
        return self.returncode


Child = subprocess.Popen[bytes] | Forked


class Template:
    """Our side of the process that has loaded torch."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.codes: dict[int, int] = {}  # of processes that have ended
        self.gone = False
        self.environment = {
            **os.environ,
            INSIDE: "template",
            LAUNCHER: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None  # None: forked for us by the shared one
        with theirs:
            if not self._forked_by_shared(theirs):
                with signals.blocked():
                    self.process = subprocess.Popen(
                        command("paralab.worker.template", str(theirs.fileno())),
                        env=self.environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                        pass_fds=[theirs.fileno()],
                    )

    def _forked_by_shared(self, theirs: socket.socket) -> bool:
        """Ask the process at the socket SHARED, if there is one, for a copy of itself that serves
        this command alone."""
        if not (address := os.environ.get(SHARED)):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shared:
            shared.connect(address)
            state = {"environment": self.environment, "folder": os.getcwd()}
            socket.send_fds(shared, [json.dumps(state).encode()], [theirs.fileno()])
            return bool(shared.recv(1))

    def fork(
        self, module: str, arguments: list[str], environment: dict[str, str], log: IO[bytes]
    ) -> Forked | None:
        """None: the template could not load torch, or is gone. Whoever is started by itself will
        say what is wrong."""
        names = self.environment.keys() | environment.keys()
        changes = {
            name: environment.get(name)
            for name in names
            if environment.get(name) != self.environment.get(name)
        }
        request = json.dumps(
            {"module": module, "arguments": arguments, "environment": changes}
        ).encode()
        theirs, ours = os.pipe()
        try:
            socket.send_fds(self.channel, [request], [theirs, log.fileno()])
        except OSError:
            self.gone = True
        finally:
            os.close(theirs)
        until = time.monotonic() + LOADING_SECONDS
        while not self.gone and (left := until - time.monotonic()) > 0:
            news = self._hear(left)
            if "forked" in news:
                return Forked(self, news["forked"], os.fdopen(ours, "wb", buffering=0))
        os.close(ours)
        return None

    def code_of(self, pid: int, seconds: float) -> int | None:
        while pid not in self.codes and not self.gone and self._hear(seconds):
            seconds = 0.0
        return self.codes.pop(pid, UNSEEN if self.gone else None)

    def _hear(self, seconds: float) -> dict[str, int]:
        """The next thing that the template says; nothing, if it says nothing in that time."""
        self.channel.settimeout(seconds)
        try:
            message = self.channel.recv(4096)
        except (TimeoutError, BlockingIOError):
            return {}
        except OSError:
            message = b""
        self.gone = not message
        news: dict[str, int] = json.loads(message or b"{}")
        if "ended" in news:
            self.codes[news["ended"]] = news["code"]
        return news

    def end(self) -> None:
        self.channel.close()  # which ends one that was forked for us
        if self.process:
            self.process.kill()
            self.process.wait()


_templates: list[
    Template | None
] = []  # of the commands that are being carried out; None: not needed so far


@contextmanager
def loading_once() -> Iterator[None]:
    """What is started in this block shares one loading of torch, where that can be."""
    _templates.append(None)
    try:
        yield
    finally:
        let_go()
        _templates.pop()


def let_go() -> None:
    """Of the process that has loaded torch; the next start loads it again."""
    if _templates and (template := _templates[-1]):
        template.end()
        _templates[-1] = None


def can_fork() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))  # how the template learns that a process has ended
    except (AttributeError, OSError):
        return False
    return not DRIVER.exists()


def start(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    log: IO[bytes],
    prefix: list[str],
    own: bool = False,
) -> Child:
    """A process that runs MODULE with ARGUMENTS, and ends when its standard input is closed.
    Signals that ask for an end are for the launcher: it begins with them blocked, or ignored.
    `own`: a process that must load torch itself."""
    if _templates and not prefix and not own and can_fork():
        if (before := _templates[-1]) and before.gone:
            let_go()
        template = _templates[-1] = _templates[-1] or Template()
        if child := template.fork(module, arguments, environment, log):
            return child
    with signals.blocked():
        return subprocess.Popen(
            [*prefix, *command(module, *arguments)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
