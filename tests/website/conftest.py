"""The browser of the page tests."""

from tests.show.conftest import browser, missing

__all__ = ["browser", "missing"]
