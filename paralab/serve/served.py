"""What `paralab serve --json` prints. This module does not need a web server."""

from paralab.record.types import Record


class Served(Record, frozen=True, kw_only=True):
    """Where the pages are. Anyone who knows the token can read the pages."""

    url: str
    token: str
    folder: str
    port: int
