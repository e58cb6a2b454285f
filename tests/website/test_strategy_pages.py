"""Each strategy's page lists exactly its options and has a picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.pictures import IMAGES, MOST_BYTES, PAGES
from paralab.plan.option import options_of
from paralab.plan.request import STRATEGIES, Request
from tests.conftest import ROOT

OVERVIEW = ROOT / "docs" / "strategies.md"


def listed_options(page: Path) -> list[str]:
    """The options in the first column of the table under `Options…`."""
    section = re.search(r"^## Options.*?(?=^## )", page.read_text(), re.MULTILINE | re.DOTALL)
    assert section, page
    return re.findall(r"`(--[\w-]+)`", " ".join(re.findall(r"^\| ([^|]+) \|", section[0], re.M)))


def test_every_strategy_has_a_page():
    assert {page.stem for page in PAGES.iterdir()} == set(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_lists_exactly_the_options_of_its_strategy(strategy):
    own = [each.flag for each in options_of(Request) if strategy in each.strategies]
    assert sorted(listed_options(PAGES / f"{strategy}.md")) == sorted(own)


def test_the_overview_lists_exactly_the_options_of_all_strategies():
    shared = [each.flag for each in options_of(Request) if not each.strategies]
    assert sorted(listed_options(OVERVIEW)) == sorted(shared)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_has_a_small_picture_of_its_strategy(strategy):
    picture = IMAGES / f"{strategy}.svg"
    assert picture.stat().st_size < MOST_BYTES
    title = ElementTree.parse(picture).getroot()[0].text
    assert title is not None
    assert title.startswith(strategy)
