"""Standard streams that a command can always write to, no matter what they are connected to.

- A closed stream (`>&-`, a daemon) becomes /dev/null. Otherwise the next file that is opened would
  get its descriptor.
- An ASCII-only stream (LANG=C) gets a readable replacement for other characters: `2 x 3 -> 6`.
- If a terminal disappears (a closed ssh session), later output is lost, and the command continues.
"""

import codecs
import errno
import io
import os
import sys
import unicodedata
from typing import Any

SYMBOLS = "× ÷ …   →  ←  ↑ ≠  ≈ ≤  ≥  ±   Σ   ′ µ μ ░ █ ▁ ▂ ▃ ▄ ▅ ▆ ▇"
LETTERS = "x / ... -> <- ^ != ~ <= >= +/- sum ' u u . # _ _ - - = = #"
READABLE = dict(zip(SYMBOLS.split(), LETTERS.split(), strict=True))
READABLE |= dict.fromkeys("·–—−─├└┤┘│", "-")


def make_safe() -> None:
    """Replace this process's streams. Call this once, at the start."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _connect_to_nothing(number)
    codecs.register_error("readable", _readable)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = _safe(sys.stdout, 1)
    sys.stderr = _safe(sys.stderr, 2)


def _safe(stream: Any, number: int) -> Any:
    """Return a safe version of our own stream. Return any other stream, such as a notebook's,
    unchanged."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    try:
        ours = type(stream) is io.TextIOWrapper and stream.fileno() == number
    except (OSError, ValueError):
        ours = False
    if not ours:
        return stream
    return _Text(
        io.BufferedWriter(_Unfailing(number, "w", closefd=False)),
        stream.encoding,
        "readable",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Text(io.TextIOWrapper):
    # click would write UTF-8 to the buffer even if the stream only accepts ASCII
    buffer = None  # type: ignore[assignment]


class _Unfailing(io.FileIO):
    def write(self, data: Any) -> int:
        number = self.fileno()
        try:
            return os.write(number, data)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            _connect_to_nothing(number)  # otherwise Python would write again at exit
            if error.errno == errno.EIO:
                return len(data)
            error.filename = "standard output" if number == 1 else "standard error"
            raise


def _connect_to_nothing(number: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)  # the new file may get the same descriptor
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)
    os.set_inheritable(number, True)


def _readable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    words = []
    for letter in error.object[error.start : error.end]:
        without_accent = unicodedata.normalize("NFKD", letter)[:1]
        words.append(READABLE.get(letter) or (without_accent if without_accent.isascii() else "?"))
    return "".join(words), error.end
