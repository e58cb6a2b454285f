"""Make untrusted text safe for a terminal or a page: escape control characters so that they are
shown, not interpreted.

A run folder, a log, a script, or a checkpoint may come from someone else, and a terminal executes
control sequences. ESC ] 0 ; sets its title, ESC [ 2 J erases it, and a bidirectional override
reverses a line. All printed text passes through `visible`: `console` and `errors` apply it to each
segment, and `echo` to a line.
"""

import re

import click

# C0 without tab and newline, DEL, C1, text direction controls, line and paragraph separators, and
# lone surrogates (which JSON can contain but a file cannot).
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    return CONTROL.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    """Replace ESC with ␛, DEL with ␡, and a character without a symbol with �. Each control
    character becomes one character, so columns keep their width."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a line that may contain untrusted text."""
    click.echo(visible(text), err=err, nl=nl)
