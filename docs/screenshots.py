"""Pictures of the page for the README and the docs: a comparison is run, and headless Chromium
looks at its report.

make screenshots                 runs `paralab compare --workload gpt` first
python docs/screenshots.py REPORT.html
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
DESK, PHONE = {"width": 1180, "height": 860}, {"width": 390, "height": 844}


def report() -> Path:
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


def section(page: Page, title: str) -> None:
    """Scroll so that a section stands at the top."""
    page.get_by_role("heading", name=title, exact=True).first.evaluate(
        "heading => heading.scrollIntoView()"
    )


def shoot(path: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=DESK, color_scheme=scheme)
            page.goto(path.resolve().as_uri())
            page.screenshot(path=IMAGES / f"verdict-{scheme}.png")
            section(page, "Speed-up against single")
            page.screenshot(path=IMAGES / f"bars-{scheme}.png")
            section(page, "ddp ×2: the last steps")
            page.screenshot(path=IMAGES / f"timeline-{scheme}.png")
            section(page, "Pipeline schedules")
            page.screenshot(path=IMAGES / f"schedule-{scheme}.png")
        page = browser.new_page(viewport=PHONE, color_scheme="light", device_scale_factor=2)
        page.goto(path.resolve().as_uri())
        page.screenshot(path=IMAGES / "phone-light.png")
        browser.close()


if __name__ == "__main__":
    shoot(Path(sys.argv[1]) if len(sys.argv) > 1 else report())
