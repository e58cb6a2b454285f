"""The reading half passes types around, not anonymous dicts."""

from tests.conftest import ROOT

PACKAGES = ("analyse", "show", "experiment", "course")


def test_hardly_any_anonymous_dict_is_left():
    found = [
        f"{path.name}:{number}"
        for package in PACKAGES
        for path in (ROOT / "paralab" / package).glob("**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "dict[str, Any]" in line
    ]
    assert len(found) <= 10, found
