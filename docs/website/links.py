"""Links between repository files become links between pages of the site.

The files in docs/ link to each other and to files outside docs/, so that they work on GitHub. On the
site, README.md is the home page, and each linked source file gets its own page:

    in docs/h200.md      ../paralab/machine/peaks.py  ->  source/paralab/machine/peaks.py.md
    in README.md         docs/tour.md#verify          ->  tour.md#verify
    in docs/practicals.md  ../paralab/course/templates  ->  only the text, because it is a folder
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = {  # file or folder in the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/schema": "schema/index.md",
}
LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def place_of(file: str) -> str | None:
    """Return the page (or image) of a file in the repository. Return None if the site does not have
    it."""
    if file in PLACES:
        return PLACES[file]
    if not (ROOT / file).is_file():
        return None
    inside = file.removeprefix("docs/")
    return inside if inside != file and not file.endswith(".py") else f"source/{file}.md"


def file_of(page: str) -> str:
    """Return the file in the repository from which a page is made."""
    return next((file for file, place in PLACES.items() if place == page), f"docs/{page}")


def targets(text: str, file: str) -> Iterator[str]:
    """Yield the files and folders in the repository to which a file links."""
    for link in LINK.finditer(text):
        yield _target(link, file)


def rewrite(text: str, file: str) -> str:
    """Return the text of a file with links to pages of the site."""
    page = place_of(file)
    assert page, file

    def replace(link: re.Match[str]) -> str:
        target = _target(link, file)
        if place := place_of(target):
            relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
            return f"[{link['text']}]({relative}{link['anchor'] or ''})"
        # A folder has no page. Leave a broken link as it is: `mkdocs build --strict` reports it.
        return link["text"] if (ROOT / target).is_dir() else link[0]

    return LINK.sub(replace, text)


def _target(link: re.Match[str], file: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), link["path"]))
