"""Take the screenshots in docs/images: run a comparison, then open its page in headless Chromium.

python3 tasks.py screenshots                 runs `paralab compare --workload gpt` first
python docs/screenshots.py REPORT.html       takes them from this page
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Locator, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
WINDOW = {"width": 1180, "height": 760}
MARGIN = 16  # pixels around a block


def write_report() -> Path:
    folder = Path(tempfile.mkdtemp()) / "compare"
    command = [
        sys.executable,
        "-m",
        "paralab",
        "compare",
        "--workload",
        "gpt",
        "--out",
        str(folder),
    ]
    subprocess.run(command, check=True)
    return folder / "report.html"


def shoot(page: Page, block: Locator, name: str) -> None:
    """Save a screenshot of one block. Callers select blocks by kind, so new titles do not break
    this script."""
    box = block.bounding_box()
    assert box, f"{name}: this page has no such block"
    clip = {
        "x": max(0, box["x"] - MARGIN),
        "y": max(0, box["y"] - MARGIN),
        "width": box["width"] + 2 * MARGIN,
        "height": box["height"] + 2 * MARGIN,
    }
    page.screenshot(path=IMAGES / f"{name}.png", clip=clip, full_page=True)


def main(report: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        page = browser.new_page(viewport=WINDOW, color_scheme="light")
        page.goto(report.resolve().as_uri())

        page.screenshot(path=IMAGES / "verdict.png")
        timelines = page.locator("article.timeline-block")
        shoot(page, page.locator("article.bars-block").first, "bars")
        shoot(page, timelines.filter(has_text="ddp ×2").first, "timeline")
        shoot(page, page.locator("article.schedule-block").first, "schedule")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else write_report())
