"""Foreign text on the way to a terminal or a page: control characters are shown, not obeyed.

A run folder, a log, a script or a checkpoint may come from somebody else, and a terminal obeys what
it is sent: ESC ] 0 ; sets its title, ESC [ 2 J erases it, a bidirectional override turns a line
around. What is printed passes through `visible`: `console` and `errors` do that for every segment,
and `echo` for a line.
"""

from __future__ import annotations

import re

import click

# C0 without tab and newline, DEL, C1, what sets the direction of text, line and paragraph
# separators, and half a surrogate pair (which JSON can hold and no file can be written with).
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    return CONTROL.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    """ESC becomes ␛, DEL ␡, and a character without a symbol �. One character for one, so that
    columns keep their width."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a line that may contain foreign text."""
    click.echo(visible(text), err=err, nl=nl)
