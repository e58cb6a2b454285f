"""The browser of the page tests, and a folder with recorded runs to serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.show.conftest import browser, missing

__all__ = ["browser", "missing", "served"]
WITHOUT = 'needs the extra `web`: pip install "paralab[web]"'
RUNS = ROOT / "tests" / "runs"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder with a finished run, a failed run, and a comparison."""
    root = tmp_path / "runs"
    for name in ("ddp", "raised", "low_precision"):
        shutil.copytree(RUNS / name, root / name)
    return root
