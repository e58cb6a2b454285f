"""What a diagnosis becomes: words in a terminal, one JSON object, SARIF. The findings are made up,
the printers are not."""

import ast
import json
import re
from pathlib import Path

import pytest

from paralab.doctor.diagnosis import look_at
from paralab.doctor.finding import Edit, Finding, ordered
from paralab.doctor.ignoring import Ignore, Ignored
from paralab.doctor.report import Diagnosis
from paralab.doctor.show import findings as terminal
from paralab.doctor.show.sarif import as_sarif
from tests.doctor.cases import CORPUS

SCRIPT = """\
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
"""
DIVIDED = Finding(
    "G01",
    "error",
    "`loss` is not divided by 4, so the gradient is 4 times too large.",
    "loss = criterion(model(x), y) / 4",
    "my train.py",
    2,
    evidence=(
        "my train.py:2: loss = criterion(model(x), y)",
        "line 4 steps every 4 batches [bold]",
    ),
    edits=(Edit("my train.py", 2, 2, ("    loss = criterion(model(x), y) / 4",)),),
)
FLUSH = Finding(
    "G06",
    "suspect",
    "If len(loader) is no multiple of 4, …",
    "step after the last batch",
    "my train.py",
    4,
)
SLOW = Finding("G02", "warning", "every pass synchronizes", "no_sync()", gain=0.25)
LATE = Finding("H03", "error", "only rank 1 calls it", "call it on all", "elsewhere.py", 7, rank=1)
SET = Finding(
    "T02",
    "warning",
    "no epoch",
    "set_epoch",
    "my train.py",
    1,
    edits=(Edit("my train.py", 1, 0, ("sampler.set_epoch(0)",)),),
)


@pytest.fixture
def diagnosis(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").write_text(SCRIPT)
    by = Ignore("my train.py", 5, ("G09",), "stepped elsewhere", range(5, 6))
    ignored = Ignored(Finding("G09", "error", "w", "f", "my train.py", 5), by)
    findings = tuple(ordered([FLUSH, LATE, SLOW, DIVIDED, SET]))
    return Diagnosis(
        "my train.py",
        ("script",),
        findings,
        "1 script",
        "what only a run shows",
        (ignored,),
        ("my train.py:9: no reason",),
    )


def test_errors_come_first_and_among_warnings_what_gains_most(diagnosis):
    assert [finding.id for finding in diagnosis.findings] == ["H03", "G01", "G02", "T02", "G06"]


def test_in_the_terminal_everything_is_said(diagnosis, capsys):
    terminal.print_diagnosis(diagnosis)
    out = capsys.readouterr().out
    for words in (
        "error G01 The loss is not divided by the accumulation steps  my train.py:2\n",
        "    1 | for i, (x, y) in enumerate(loader):\n  > 2 |     loss = criterion(model(x), y)\n    3 |     loss.backward()\n",
        "`loss` is not divided by 4",
        "line 4 steps every 4 batches [bold]",
        "+    loss = criterion(model(x), y) / 4",
        "error H03 A collective that only some ranks call  elsewhere.py:7, rank 1\n",
        "25% of the step",
        "note my train.py:9: no reason\n",
        "2 errors, 2 warnings, 1 suspect (1 finding silenced by comments); paralab doctor --explain H03 tells more\n",
    ):
        assert words in out, words
    assert "seen  my train.py:2" not in out, "the line itself stands there already"


def test_health_is_told_with_its_limits(capsys):
    terminal.print_diagnosis(
        Diagnosis("train.py", ("script",), (), "1 script", "what only a run shows")
    )
    assert (
        capsys.readouterr().out
        == "nothing found in train.py. Looked at: 1 script. Not looked at: what only a run shows.\n"
    )


@pytest.mark.parametrize(
    ("findings", "command", "strict", "code"),
    [
        ((), None, False, 0),
        ((DIVIDED,), None, False, 1),
        ((SLOW,), None, False, 1),
        ((FLUSH,), None, False, 0),
        ((FLUSH,), None, True, 1),
        ((), 3, False, 1),  # the watched command failed, and nobody knows why
    ],
)
def test_exit_codes(findings, command, strict, code):
    assert (
        Diagnosis("x", ("ranks",), findings, "", "", command_exit_code=command).exit_code(strict)
        == code
    )


def test_json_carries_what_is_documented(diagnosis):
    told = json.loads(json.dumps(diagnosis.to_json()))
    fields = {
        "id",
        "title",
        "severity",
        "file",
        "line",
        "rank",
        "why",
        "fix",
        "evidence",
        "gain",
        "patch",
    }
    assert all(finding.keys() == fields for finding in told["findings"])
    one = next(finding for finding in told["findings"] if finding["id"] == "G01")
    assert one["patch"].splitlines()[:2] == ["--- a/my train.py", "+++ b/my train.py"]
    assert (one["file"], one["line"], one["evidence"]) == ("my train.py", 2, list(DIVIDED.evidence))
    assert told["ignored"][0].keys() == fields | {"reason"}
    assert told["subject"] == "my train.py"


def test_sarif_has_what_code_hosts_need(diagnosis):
    sarif = json.loads(json.dumps(as_sarif(diagnosis)))
    assert sarif["version"] == "2.1.0"
    assert sarif["$schema"].endswith("sarif-2.1.0.json")
    (run,) = sarif["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"]
    assert [rule["id"] for rule in rules] == ["H03", "T02", "G01", "G02", "G06", "G09"]
    for rule in rules:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
        assert "```python" in rule["help"]["markdown"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (place,) = result["locations"]  # a code host drops what has none
        assert place["physicalLocation"]["region"]["startLine"] >= 1
        assert place["physicalLocation"]["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
        assert re.fullmatch(
            r"[0-9a-f]{32}:1", result["partialFingerprints"]["primaryLocationLineHash"]
        )
    level = {result["ruleId"]: result["level"] for result in run["results"]}
    assert level == {
        "H03": "error",
        "G01": "error",
        "G02": "warning",
        "T02": "warning",
        "G06": "note",
        "G09": "error",
    }
    silenced = [result["ruleId"] for result in run["results"] if "suppressions" in result]
    assert silenced == ["G09"]
    place = run["results"][1]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20train.py"
    assert place["region"] == {
        "startLine": 2,
        "snippet": {"text": "    loss = criterion(model(x), y)"},
    }


def test_equal_lines_have_fingerprints_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (CORPUS / "H03" / "broken.py").read_text()
    Path("train.py").write_text(script)
    (once,) = as_sarif(look_at([Path("train.py")]))["runs"][0]["results"]
    (mark,) = [line for line in script.splitlines(keepends=True) if "# finds H03" in line]
    Path("train.py").write_text("import os\n" + script.replace(mark, mark + mark))
    twice = as_sarif(look_at([Path("train.py")]))["runs"][0]["results"]
    line = once["partialFingerprints"]["primaryLocationLineHash"].removesuffix(":1")
    assert [result["partialFingerprints"]["primaryLocationLineHash"] for result in twice] == [
        f"{line}:1",
        f"{line}:2",
    ]


def test_the_fixes_in_sarif_say_the_same_as_the_patch(diagnosis):
    """Applied as a code host would do it, by line and column, they give a script with the fix in
    it."""
    (run,) = as_sarif(diagnosis)["runs"]
    text = SCRIPT
    for result in run["results"]:
        for change in (
            change for fix in result.get("fixes", ()) for change in fix["artifactChanges"]
        ):
            for replacement in change["replacements"]:
                text = _replaced(
                    text, replacement["deletedRegion"], replacement["insertedContent"]["text"]
                )
    assert text == "sampler.set_epoch(0)\n" + SCRIPT.replace("y)\n", "y) / 4\n")
    ast.parse(text)


def _replaced(text, region, inserted):
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = starts[region["startLine"] - 1] + region["startColumn"] - 1
    last = starts[region["endLine"] - 1] + region["endColumn"] - 1
    return text[:first] + inserted + text[last:]
