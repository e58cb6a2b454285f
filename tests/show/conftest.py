"""A real browser for the page tests: Playwright with Chromium."""

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
    """Skip a test that has no browser, or fail it if PARALAB_REQUIRE_BROWSER=1."""
    return pytest.fail if os.environ.get("PARALAB_REQUIRE_BROWSER") == "1" else pytest.skip


@pytest.fixture(scope="module")
def browser(missing: Missing) -> Iterator[Any]:
    """Start one Chromium for all tests in a file."""
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
