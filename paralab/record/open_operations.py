"""A process's current operations, in a small file mapped into its memory. Writing needs no system
call. Other processes can read the file even if this process hangs, holds the GIL, or was killed."""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

SIZE = 4096
HEAD = struct.Struct("<qi")  # the number of writes, the length of the text


class OpenOperations:
    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self.count = 0

    def write(self, text: bytes) -> None:
        """Write the text. While the text changes, the length is 0, and readers try again."""
        self.count += 1
        text = text[: SIZE - HEAD.size]
        HEAD.pack_into(self._map, 0, self.count, 0)
        self._map[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(self._map, 0, self.count, len(text))


def read_open_operations(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of writes, and the open operations from outermost to innermost. If the file
    cannot be read, return 0 and an empty list."""
    try:
        raw = path.read_bytes()
        count, length = HEAD.unpack_from(raw)
        value = json.loads(raw[HEAD.size : HEAD.size + length]) if length else []
    except (OSError, ValueError, struct.error):
        return 0, []
    return count, value if isinstance(value, list) else []
