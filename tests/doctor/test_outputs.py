"""The formats of a diagnosis: text, concise, github, JSON, and SARIF, with made-up findings."""

import ast
import json
import re
from pathlib import Path

import pytest

from paralab.doctor.diagnosis import check_paths
from paralab.doctor.registry import Edit, Failure, Finding, ordered
from paralab.doctor.report import Diagnosis
from paralab.doctor.show import findings as terminal
from paralab.doctor.show.lines import concise, github
from paralab.doctor.show.sarif import as_sarif
from paralab.doctor.suppressions import Ignored
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
    unstepped = Finding("G09", "error", "w", "f", "my train.py", 5)
    ignored = Ignored(unstepped, "comment", "stepped elsewhere")
    findings = tuple(ordered([FLUSH, LATE, SLOW, DIVIDED, SET]))
    return Diagnosis(
        "my train.py",
        ("script",),
        findings,
        "1 script",
        "what only a run shows",
        (ignored,),
        {"H17": 2},
        (Failure("net.py", "check S01 unused failed: KeyError: 'x'", "S01 unused"),),
        ("my train.py:9: no reason",),
    )


def test_errors_come_first_and_among_warnings_what_gains_most(diagnosis):
    assert [finding.id for finding in diagnosis.findings] == ["H03", "G01", "G02", "T02", "G06"]


def test_text(diagnosis, capsys):
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
        "not checked net.py: check S01 unused failed: KeyError: 'x'\n",
        "note my train.py:9: no reason\n",
        "2 errors, 2 warnings in 2 files. Try: paralab doctor --explain H03\n",
        "1 suspect, possible but not confirmed. Try: --suspects\n",
        "Off by default: 2 H17 findings (",
        "). Try: --select H17\n",
        "Silenced: 1 by comments.\n",
    ):
        assert words in out, words
    assert "seen  my train.py:2" not in out, "the context shows this line already"
    assert "G06" not in out


def test_text_shows_suspects_on_request(diagnosis, capsys):
    terminal.print_diagnosis(diagnosis, suspects=True)
    out = capsys.readouterr().out
    assert "suspect G06" in out
    assert "2 errors, 2 warnings, 1 suspect in 2 files. " in out
    assert "--suspects" not in out


def test_text_explains_a_repeated_failure_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("".join(f"dist.barrier({number})\n" for number in range(40)))
    places = [
        Finding("H03", "error", f"only rank {number}", "call it", "a.py", number + 1)
        for number in range(40)
    ]
    terminal.print_diagnosis(Diagnosis("a.py", ("script",), tuple(places), "1 script", ""))
    out = capsys.readouterr().out
    assert "a.py:1 and 39 more places\n" in out
    assert out.count("why") == out.count("fix") == out.count("only rank") == 1
    assert "  also  a.py:2  dist.barrier(1)\n        a.py:3  dist.barrier(2)\n" in out
    assert "and 19 more (--format concise lists all)\n" in out
    assert len(out.splitlines()) < 35


def test_concise_has_one_line_per_finding(diagnosis):
    assert concise(diagnosis, suspects=False) == [
        "my train.py: G02 warning every pass synchronizes",
        "elsewhere.py:7: H03 error only rank 1 calls it",
        "my train.py:1: T02 warning no epoch",
        "my train.py:2: G01 error `loss` is not divided by 4, so the gradient is 4 times too large.",
    ]
    suspect = "my train.py:4: G06 suspect If len(loader) is no multiple of 4, …"
    assert concise(diagnosis, suspects=True)[-1] == suspect


def test_github_escapes_what_its_commands_reserve(tmp_path):
    finding = Finding("G06", "warning", "100 %\nof it", "do: this, then that", "a,b.py", 3)
    diagnosis = Diagnosis("x", ("script",), (finding,), "", "")
    (line,) = github(diagnosis, suspects=False)
    assert line.startswith("::warning file=a%2Cb.py,line=3,title=G06 ")
    assert line.endswith("::100 %25%0Aof it Fix: do: this, then that")


def test_nothing_found_says_what_was_not_checked(capsys):
    terminal.print_diagnosis(
        Diagnosis("train.py", ("script",), (), "1 script", "what only a run shows")
    )
    assert capsys.readouterr().out == (
        "No problems found in train.py.\nChecked: 1 script.\nNot checked: what only a run shows.\n"
    )


@pytest.mark.parametrize(
    ("findings", "command", "strict", "code"),
    [
        ((), None, False, 0),
        ((DIVIDED,), None, False, 1),
        ((SLOW,), None, False, 1),
        ((FLUSH,), None, False, 0),
        ((FLUSH,), None, True, 1),
        ((), 3, False, 1),  # the watched command failed for an unknown reason
    ],
)
def test_exit_codes(findings, command, strict, code):
    diagnosis = Diagnosis("x", ("ranks",), findings, "", "", command_exit_code=command)
    assert diagnosis.exit_code(strict) == code


@pytest.mark.parametrize(("check", "code"), [(None, 1), ("S01 unused", 0)])
def test_a_file_that_cannot_be_analyzed_counts_and_our_own_failure_does_not(check, code):
    failure = Failure("net.py", "why", check)
    assert Diagnosis("x", ("script",), (), "", "", failures=(failure,)).exit_code() == code


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
    assert told["ignored"][0].keys() == fields | {"by", "reason"}
    assert told["hidden"] == {"H17": 2}
    assert told["failures"][0]["check"] == "S01 unused"
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
        assert "```diff" in rule["help"]["markdown"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (place,) = result["locations"]  # a code host drops results without one
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
    (once,) = as_sarif(check_paths([Path("train.py")]))["runs"][0]["results"]
    (mark,) = [line for line in script.splitlines(keepends=True) if "# finds H03" in line]
    Path("train.py").write_text("import os\n" + script.replace(mark, mark + mark))
    twice = as_sarif(check_paths([Path("train.py")]))["runs"][0]["results"]
    line = once["partialFingerprints"]["primaryLocationLineHash"].removesuffix(":1")
    assert [result["partialFingerprints"]["primaryLocationLineHash"] for result in twice] == [
        f"{line}:1",
        f"{line}:2",
    ]


def test_the_fixes_in_sarif_say_the_same_as_the_patch(diagnosis):
    """Applying the fixes by line and column, as a code host would, gives a fixed script."""
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
