"""The documentation site builds without warnings, is complete, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from docs.website.api_page import api_page
from docs.website.links import rewrite
from paralab.api import ALL
from paralab.plan.request import STRATEGIES
from tests.conftest import ROOT

# Attributes whose address a browser loads when it opens the page
LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}
REMOTE = re.compile(r"(?:https?:)?//")
REMOTE_IN_CSS = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Loads(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if (tag, name) in LOADED]


@pytest.mark.processes
def test_the_site_loads_nothing_from_a_network_and_every_file_it_loads_exists(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        addresses = Loads(page.read_text()).addresses
        assert len(addresses) > 3  # the theme's styles and scripts
        assert [address for address in addresses if REMOTE.match(address)] == []
        if page.name != "404.html":  # it has absolute addresses, for a server
            gone = [
                a for a in addresses if not a.startswith("data:") and not (page.parent / a).exists()
            ]
            assert gone == [], page
    for sheet in site.rglob("*.css"):
        assert not REMOTE_IN_CSS.search(sheet.read_text()), sheet.name


@pytest.mark.processes
def test_the_site_has_a_page_for_each_strategy_failure_notebook_and_schema(site):
    for strategy in STRATEGIES:
        assert (
            f"images/strategies/{strategy}.svg"
            in (site / f"strategies/{strategy}.html").read_text()
        )
    for folder, pattern, page in (
        ("docs/doctor", "[A-Z]??.md", "doctor/{}.html"),
        ("docs/notebooks", "*.ipynb", "notebooks/{}.html"),
        ("docs/schema", "*.json", "schema/{}.json"),
    ):
        names = [file.stem for file in (ROOT / folder).glob(pattern)]
        assert names
        assert [name for name in names if not (site / page.format(name)).is_file()] == []
    assert [file.name for file in site.rglob("*") if file.suffix in (".py", ".pyc")] == []


def test_search_works_from_the_file_system(site: Path, browser: Any):
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto((site / "strategies" / "ddp.html").as_uri())
        page.click("input[name=query]")
        page.keyboard.type("reduce-scatter")
        # Each key starts a search, so wait for this result instead of reading a list that changes.
        page.locator('.md-search-result__link[href*="strategies/fsdp.html"]').first.wait_for()


def test_a_picture_on_a_phone_is_large_enough_to_read(site: Path, browser: Any):
    """Its text was once 3 px high."""
    with browser.new_context(viewport={"width": 390, "height": 844}) as context:
        page = context.new_page()
        page.goto((site / "strategies" / "ddp.html").as_uri())
        assert page.locator(".picture img").bounding_box()["width"] > 700
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator(".picture").focus()  # then the arrow keys scroll


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(site: Path, browser: Any, scheme: str):
    from axe_playwright_python.sync_playwright import Axe

    with browser.new_context(color_scheme=scheme, bypass_csp=True) as context:
        page = context.new_page()
        for name in ("index.html", "tour.html", "api.html", "strategies/ddp.html"):
            page.goto((site / name).as_uri())
            found = Axe().run(page).response
            assert len(found["passes"]) > 20  # it checked something
            serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
            assert [(name, each["id"], each["nodes"][0]["html"]) for each in serious] == []


def test_the_navigation_lists_every_page():
    """`mkdocs build --strict` also checks this, but not in the quick tests."""
    listed = re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = [str(page.relative_to(docs)) for page in docs.glob("**/*.md")]
    entries = [page for page in pages if re.fullmatch(r"doctor/[A-Z]\d\d\.md", page)]
    assert sorted(set(pages) - set(entries) - set(listed)) == []


def test_links_lead_to_pages_of_the_site():
    text = (
        "[a](docs/tour.md#plan) [b](CONTRIBUTING.md) [c](practicals) [d](docs/schema) [e](gone.md)"
    )
    assert rewrite(text, "README.md") == (
        "[a](tour.md#plan) [b](contributing.md) c [d](schema/index.md) [e](gone.md)"
    )
    text = "[a](../../README.md) [b](ddp.md#options) [c](../../tasks.py) [d](https://pytorch.org) [e](#options)"
    assert rewrite(text, "docs/strategies/dp.md") == (
        "[a](../index.md) [b](ddp.md#options) [c](../source/tasks.py.md) [d](https://pytorch.org) [e](#options)"
    )


def test_the_api_page_has_every_function_option_and_field():
    page = api_page()
    rows = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert {option.name for option in ALL} <= set(rows)
    assert {"model", "split_points", "data_path", "paralab.UsageError"} <= set(rows)
    assert re.findall(r"^## (paralab\.[a-z]+)$", page, re.MULTILINE) == [
        "paralab.run",
        "paralab.compare",
        "paralab.verify",
        "paralab.practical",
    ]
    assert page.count("    **options,\n") == 3
    assert "step_deadline: float = 120" in page  # an argument of verify, but an option of run
