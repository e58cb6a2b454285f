"""Read each of the user's files once, so that the doctor checks, shows, and patches the same
text."""

import io
import tokenize
from dataclasses import dataclass, field
from pathlib import Path


def lines_of(text: str) -> list[str]:
    """Return the lines with their endings. (str.splitlines also splits at form feeds.)"""
    return list(io.StringIO(text, newline=""))


@dataclass
class Sources:
    _texts: dict[str, str | None] = field(default_factory=dict)

    def text(self, file: str) -> str | None:
        """Return the text, or None if the file is not text or not on this machine."""
        if file not in self._texts:
            self._texts[file] = read(Path(file))
        return self._texts[file]

    def lines(self, file: str) -> list[str]:
        """Return the lines without their line endings, or an empty list if the file is not here."""
        return [line.rstrip("\r\n") for line in lines_of(self.text(file) or "")]

    def line(self, file: str | None, number: int | None) -> str | None:
        lines = self.lines(file) if file and number else []
        return lines[number - 1] if number and 1 <= number <= len(lines) else None

    def forget(self) -> None:
        """Clear the cache, because files have changed."""
        self._texts.clear()


def encoding_of(path: Path) -> str:
    with path.open("rb") as stream:
        return tokenize.detect_encoding(stream.readline)[0]


def read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode(encoding_of(path))
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
        return None


def python_of(path: Path) -> str:
    """Return the text of a script in its declared encoding, without a byte order mark. Bytes that
    do not decode become replacement characters."""
    text = read(path)
    return path.read_bytes().decode("utf-8", errors="replace") if text is None else text
