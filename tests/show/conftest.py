"""A real browser for what is to be looked at in one: Playwright and a Chromium, or a word that they
are missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
)
Missing = Callable[[str], NoReturn]


@pytest.fixture(scope="module")
def missing() -> Missing:
    """Says what a browser test lacks: it is skipped, or fails if PARALAB_REQUIRE_BROWSER=1."""
    return pytest.fail if os.environ.get("PARALAB_REQUIRE_BROWSER") == "1" else pytest.skip


@pytest.fixture(scope="module")
def browser(missing: Missing) -> Iterator[Any]:
    """One Chromium for all tests of a file."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("needs Playwright: pip install playwright")
    with sync_playwright() as playwright:
        found = [
            shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")
        ] + [playwright.chromium.executable_path]
        program = next((path for path in found if path and Path(path).exists()), None)
        if program is None:
            missing("needs a Chromium: apt-get install chromium, or playwright install chromium")
        launched = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield launched
        launched.close()
