"""Serve the pages on 127.0.0.1 until a signal stops the command."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from paralab.errors import UsageError
from paralab.machine.signals import ENDS, set_handlers
from paralab.serve.app import Site, make_app, new_token
from paralab.serve.served import Served

ADDRESS = "127.0.0.1"
SHUTDOWN_SECONDS = 2  # time for open requests to finish


class _Server(uvicorn.Server):  # type: ignore[misc, unused-ignore]  # if it is not installed
    """Closes the streams on a signal, and leaves the exit code to the command."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self.site = site
        self.received: list[int] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = set_handlers(dict.fromkeys(ENDS, self._stop))
        try:
            yield
        finally:
            set_handlers(before)

    def _stop(self, number: int, frame: object) -> None:
        self.force_exit = bool(self.received)  # the second Ctrl-C does not wait
        self.received.append(number)
        self.site.is_stopping = self.should_exit = True


def serve(folder: Path, port: int, announce: Callable[[Served], None]) -> int:
    """Serve until a signal arrives, and return its number. `port` 0 means any free port."""
    token = new_token()
    with _listen(port) as listener:
        port = listener.getsockname()[1]
        app, site = make_app(folder, token, cookie=f"paralab-{port}")
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        server = _Server(config, site)
        url = f"http://{ADDRESS}:{port}/?token={token}"
        announce(Served(url=url, token=token, folder=str(folder), port=port))
        server.run([listener])
        return server.received[0]


def _listen(port: int) -> socket.socket:
    """Listen before announcing the address, so that the first request never fails."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        problem = f"Port {port} cannot be used: {error.strerror}."
        raise UsageError(problem, fix="another --port, or none for a free port") from error
    return listener
