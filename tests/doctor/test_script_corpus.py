"""Reading a script finds its mistake at the right line, however it is written, and finds nothing
in the healthy twin."""

import time
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.static.script import Script
from tests.doctor.cases import HEALTHY, broken, cases, healthy

LONG = sorted(
    [
        *HEALTHY.glob("*.py"),
        *HEALTHY.glob("*/train.py"),
        *(HEALTHY.parent / "healthy_ranks").glob("*.py"),
    ]
)


def read(path):
    return apply("script", Script(path))


def place(finding):
    return finding.id, Path(finding.file).name, finding.line


@pytest.mark.parametrize("case", broken("script"), ids=str)
def test_a_mistake_is_found_at_its_line(case):
    findings = read(case.script)
    expected = case.expected("script")
    assert expected <= {place(finding) for finding in findings}
    more = [finding for finding in findings if place(finding) not in expected]
    assert not [
        finding for finding in more if finding.severity == "error" or finding.id == case.entry
    ], more
    for finding in findings:
        assert finding.why, finding
        assert finding.fix, finding
        assert finding.evidence, finding


@pytest.mark.parametrize("case", healthy(), ids=str)
def test_a_healthy_twin_has_no_finding(case):
    assert read(case.script) == []


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.ways and "script" not in case.ways], ids=str
)
def test_a_mistake_that_cannot_be_read_is_not_taken_for_another(case):
    assert [finding for finding in read(case.script) if finding.severity == "error"] == []


@pytest.mark.parametrize("path", LONG, ids=lambda path: str(path.relative_to(HEALTHY.parent)))
def test_long_healthy_scripts_have_no_finding(path):
    assert read(path) == []


def test_a_thousand_lines_are_read_within_a_second(tmp_path):
    text = (HEALTHY / "imagenet" / "train.py").read_text()
    lines = text.splitlines()
    more = range((1000 - len(lines)) // 4 + 1)
    functions = "\n".join(
        f"def extra{number}(x):\n    y = x + {number}\n    return y\n" for number in more
    )
    long = tmp_path / "train.py"
    long.write_text(
        text.replace('if __name__ == "__main__":', functions + '\n\nif __name__ == "__main__":')
    )
    assert len(long.read_text().splitlines()) >= 1000
    read(long)  # the checks' modules are imported once
    started = time.process_time()
    read(long)
    assert time.process_time() - started < 1
