"""Write one rank's events as JSON lines in a background thread, so training never waits for a disk.

Lines reach the file within `FLUSH_SECONDS`. A killed process loses at most the lines from its last
`FLUSH_SECONDS`, and truncates at most one line.
"""

import json
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from paralab.errors import naming

FLUSH_SECONDS = 0.05
# `json.dumps` would create a new encoder for each event.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class EventWriter:
    def __init__(self, path: Path) -> None:
        self._queue: SimpleQueue[list[dict[str, Any]] | None] = SimpleQueue()
        self.path = path
        self._file = path.open("x", encoding="utf-8")  # x: never overwrite a file
        self._closing = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="paralab-events", daemon=True)
        self._thread.start()

    def write(self, events: list[dict[str, Any]]) -> None:
        """Queue events and return. Raise the error if earlier events could not be written."""
        if self._error:
            raise self._error
        self._queue.put(events)

    def close(self) -> None:
        """Write the remaining events and close the file. Raise the error if that failed."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join()
        if self._error:
            raise self._error

    def _work(self) -> None:
        try:
            with naming(self.path), self._file:
                while self._write_queued():
                    # Collect more events: one write per interval, no matter how short the steps.
                    self._closing.wait(FLUSH_SECONDS)
        except OSError as error:
            self._error = error

    def _write_queued(self) -> bool:
        """Wait for events and write all of them. Return False after the last events."""
        batches = [self._queue.get()]
        batches += [self._queue.get() for _ in range(self._queue.qsize())]
        lines = [_encode(event) + "\n" for batch in batches if batch for event in batch]
        self._file.write("".join(lines))
        self._file.flush()
        return batches[-1] is not None
