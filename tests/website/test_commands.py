"""Every command on the other pages runs. tests/test_install.py runs those of README and the tour."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.page_commands import (
    DRIVER,
    PAGES,
    SHORTER,
    SKIPPED,
    TUTORIALS,
    check_commands,
    commands_of,
    runnable,
    written,
)

STRATEGIES = [page for page in PAGES if page.parent.name == "strategies"]
OTHERS = [page for page in PAGES if page not in (*TUTORIALS, *STRATEGIES)]


@pytest.mark.processes
@pytest.mark.parametrize("pages", [STRATEGIES, OTHERS], ids=["strategies", "others"])
def test_every_command_of_these_pages_runs(tmp_path, pages):
    """The commands run in one process, which forks their ranks: importing torch takes most time."""
    tutorials = "".join(page.read_text() for page in TUTORIALS)
    named, given = commands_of(pages, tmp_path, known=runnable(tutorials).values())
    assert len(named) > 30
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps([given, ""]),
        capture_output=True,
        text=True,
        timeout=500,
    )
    check_commands(named, done)


def test_every_rule_applies_to_some_command():
    """Otherwise the lists would keep rules for commands that are gone."""
    found = {command for page in PAGES for command in written(page.read_text())}
    for pattern in SKIPPED:
        skipped = {command for command in found if re.search(pattern, command)}
        assert skipped, pattern
        found -= skipped
    for pattern, instead in SHORTER:
        changed = {command: re.sub(pattern, instead, command) for command in found}
        assert any(old != new for old, new in changed.items()), pattern
        found = set(changed.values())
