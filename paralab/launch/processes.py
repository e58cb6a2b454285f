"""Child processes that import torch: ranks, and processes that inspect a workload.

Importing torch takes a second or two, and a command needs several such processes. So within
`import_torch_once`, one process imports torch and forks the others (`paralab.worker.processes.template`). But
each process imports torch itself in these cases:

- on systems other than Linux 5.3 or newer, such as macOS, where a process that has loaded
  frameworks cannot fork safely
- on a machine with an NVIDIA driver, which does not work in a fork of a process that used it
- with a prefix (numactl …), or with environment variables that libraries read at import
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paralab.machine import signals
from paralab.machine.child import command
from paralab.record.status_board import UNKNOWN_CODE

INSIDE = "PARALAB_INSIDE"  # set in child processes, so they do not start ranks
LAUNCHER = "PARALAB_LAUNCHER"  # the launcher's process ID
SHARED = "PARALAB_TEMPLATE"  # the socket of a template for many commands; only the tests use it
IMPORT_SECONDS = 600
DRIVER = Path("/dev/nvidiactl")


class Forked:
    """A process that the template forked. It has the `subprocess.Popen` methods that we use."""

    def __init__(self, template: "Template", pid: int, stdin: IO[bytes]) -> None:
        self.template, self.pid, self.stdin = template, pid, stdin
        self.returncode: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """Return the exit code, or None if the process does not exit within this time."""
        if self.returncode is None:
            self.returncode = self.template.wait_for(self.pid, seconds)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll(max(0.0, until - time.monotonic()))) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Child = subprocess.Popen[bytes] | Forked


class Template:
    """The launcher's connection to the process that has imported torch."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.codes: dict[int, int] = {}  # process ID -> exit code
        self.gone = False
        self.environment = {**os.environ, INSIDE: "template", **_launcher_variables()}
        self.process: subprocess.Popen[bytes] | None = None  # None if the shared template forked it
        with theirs:
            if not self._forked_by_shared(theirs):
                words = command("paralab.worker.processes.template", str(theirs.fileno()))
                silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
                self.process = _popen(words, self.environment, pass_fds=[theirs.fileno()], **silent)

    def _forked_by_shared(self, theirs: socket.socket) -> bool:
        """Ask the template at the socket SHARED, if any, to fork a template for this command."""
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
        """Fork a process. Return None if the template has exited or could not import torch. The
        caller then starts the process directly, which reports the error."""
        removed = dict.fromkeys(self.environment.keys() - environment.keys())
        changed = dict(environment.items() - self.environment.items())
        request = {"module": module, "arguments": arguments, "environment": removed | changed}
        theirs, ours = os.pipe()
        try:
            message = json.dumps(request).encode()
            socket.send_fds(self.channel, [message], [theirs, log.fileno()])
        except OSError:
            self.gone = True
        finally:
            os.close(theirs)
        until = time.monotonic() + IMPORT_SECONDS
        while not self.gone and (left := until - time.monotonic()) > 0:
            answer = self._receive(left)
            if "forked" in answer:
                return Forked(self, answer["forked"], os.fdopen(ours, "wb", buffering=0))
        os.close(ours)
        return None

    def wait_for(self, pid: int, seconds: float) -> int | None:
        """Return a process's exit code, or None if the process does not exit within this time."""
        while pid not in self.codes and not self.gone and self._receive(seconds):
            seconds = 0.0
        return self.codes.pop(pid, UNKNOWN_CODE if self.gone else None)

    def _receive(self, seconds: float) -> dict[str, int]:
        """Return the template's next message, or an empty dict if none arrives within this time."""
        self.channel.settimeout(seconds)
        try:
            message = self.channel.recv(4096)
        except (TimeoutError, BlockingIOError):
            return {}
        except OSError:
            message = b""
        self.gone = not message
        answer: dict[str, int] = json.loads(message or b"{}")
        if "ended" in answer:
            self.codes[answer["ended"]] = answer["code"]
        return answer

    def end(self) -> None:
        self.channel.close()  # stops a template that the shared template forked
        if self.process:
            self.process.kill()
            self.process.wait()


def _launcher_variables() -> dict[str, str]:
    """Return the environment variables for all processes that we start."""
    return {LAUNCHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def _popen(
    words: list[str], environment: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    with signals.blocked():
        return subprocess.Popen(words, env=environment, start_new_session=True, **options)


# One entry per running command, or None if the command has not needed a template yet.
_templates: list[Template | None] = []


@contextmanager
def import_torch_once() -> Iterator[None]:
    """Let all processes that start in this context share one import of torch, if possible."""
    _templates.append(None)
    try:
        yield
    finally:
        end_template()
        _templates.pop()


def end_template() -> None:
    """Make the next process import torch again."""
    if _templates and (template := _templates[-1]):
        template.end()
        _templates[-1] = None


def can_fork() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))  # the template uses pidfds to wait for a process
    except (AttributeError, OSError):
        return False
    return not DRIVER.exists()


def start(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    log: IO[bytes],
    prefix: Sequence[str] = (),
    own: bool = False,
) -> Child:
    """Start a process that runs a module and exits when its standard input is closed. Stop signals
    are blocked or ignored in it, because only the launcher handles them. If `own` is true, it
    imports torch itself."""
    environment = {**environment, **_launcher_variables()}
    if _templates and not prefix and not own and can_fork():
        if (before := _templates[-1]) and before.gone:
            end_template()
        template = _templates[-1] = _templates[-1] or Template()
        if child := template.fork(module, arguments, environment, log):
            return child
    words = [*prefix, *command(module, *arguments)]
    return _popen(words, environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
