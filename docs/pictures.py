"""Draw the pictures in docs/images/strategies: run the first command of each strategy's page and
export its timeline.

    python docs/pictures.py             all of them (two minutes on two idle cores)
    python docs/pictures.py ddp mp      only these strategies
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = DOCS / "strategies"
IMAGES = DOCS / "images" / "strategies"
MOST_BYTES = 100_000


def command_of(page: Path) -> list[str]:
    """Return the words after `paralab` in the page's first command."""
    found = re.search(r"^```\nparalab (run .+)\n```$", page.read_text("utf-8"), re.MULTILINE)
    assert found, f"{page.name} does not begin with a command: paralab run …"
    return shlex.split(found[1])


def draw(page: Path, picture: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        paralab = (sys.executable, "-m", "paralab")
        subprocess.run([*paralab, *command_of(page), "--out", folder], check=True)
        export = ("show", folder, "--figure", "timeline", "--svg", picture)
        subprocess.run([*paralab, *export], check=True, stdout=subprocess.DEVNULL)
    size = picture.stat().st_size
    assert size < MOST_BYTES, f"{picture.name} has {size:,} bytes; use fewer micro-batches"


def main(names: list[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        if not names or page.stem in names:
            draw(page, IMAGES / f"{page.stem}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
