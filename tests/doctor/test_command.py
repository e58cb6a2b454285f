"""`paralab doctor` on the command line: subjects, options, formats, and usage errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paralab.cli import main as cli
from paralab.doctor import attach, diagnosis, scripts, watch
from paralab.doctor.catalog import ENTRIES
from paralab.doctor.logs import reading as log_reading
from paralab.doctor.registry import Edit, Finding
from paralab.doctor.scripts import Checked
from paralab.doctor.static.script import Script
from paralab.errors import UsageError
from tests.conftest import ROOT, check_schema, run_paralab
from tests.doctor.cases import CORPUS

SCRIPT = "loss = f(x)\nloss.backward()\n"


def undivided(path):
    """A check for these tests: line 1 lacks its `/ 4`."""
    lines = path.read_text().splitlines()
    if "/ 4" in lines[0]:
        return []
    edit = Edit(str(path), 1, 1, (lines[0] + " / 4",))
    return [Finding("G01", "error", "not divided by 4", "divide", str(path), 1, edits=(edit,))]


class Observed:
    def __init__(self, findings, exit_code):
        self.findings, self.exit_code, self.notes, self.cost = (
            findings,
            exit_code,
            ("no GPU here",),
            0.0123,
        )


class Paths(list):
    """Replaces the logs at these paths."""

    notes = ()


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Run a command with fake checks that record their calls."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    asked = []

    def apply(source, subject, **options):
        asked.append((source, subject))
        return []

    def check_script(path, ids, project):
        asked.append(("script", path))
        return Checked(path, undivided(path), modules=frozenset([str(path.resolve())]))

    def observe(command, **options):
        os.write(1, b"epoch 1\n")  # as a child process would
        for finding in (found := undivided(Path("train.py"))):
            options["say"](finding)
        asked.append((command, options))
        return Observed(found, 1)

    missing = Finding("H03", "error", "rank 1 is missing", "call it", rank=1)
    monkeypatch.setattr(diagnosis, "apply", apply)
    monkeypatch.setattr(scripts, "check_script", check_script)
    monkeypatch.setattr(log_reading, "read_logs", lambda paths: Paths(map(str, paths)))
    monkeypatch.setattr(watch, "observe", observe)
    monkeypatch.setattr(attach, "attach", lambda pid: ([missing], []))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["paralab", "doctor", *words])
        done = CliRunner().invoke(cli.main, ["doctor", *words])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        if "--json" in words and "--" not in words:
            check_schema(["doctor", *words], done.stdout)
        done.asked = asked
        return done

    return run


def test_a_script_is_read(typed):
    done = typed("train.py")
    assert done.exit_code == 1
    assert "error G01" in done.stdout
    assert done.asked == [("script", Path("train.py"))]


def test_scripts_and_logs_may_be_given_together(typed, tmp_path):
    (tmp_path / "job.log").touch()
    (tmp_path / "ranks").mkdir()
    done = typed("train.py", "job.log", "ranks", "-")
    assert done.asked == [("script", Path("train.py")), ("log", ["job.log", "ranks", "-"])]


def test_what_stands_after_the_dashes_is_watched_as_it_is(typed):
    done = typed("--try", "3", "--stall", "5", "--", "torchrun", "train.py", "--json", "--", "x y")
    [(command, asked)] = done.asked
    assert (command, asked["steps"], asked["stall_seconds"]) == (
        ["torchrun", "train.py", "--json", "--", "x y"],
        3,
        5.0,
    )
    assert not asked["folder"].exists(), "nothing is left behind that nobody asked for"
    assert done.exit_code == 1
    assert "error G01" in done.stdout


@pytest.mark.parametrize(("stopped", "code", "note"), [(True, 0, False), (False, 1, True)])
def test_a_trial_that_we_ended_is_healthy_and_a_command_that_failed_is_not(
    typed, monkeypatch, stopped, code, note
):
    code_told = None if stopped else -15
    monkeypatch.setattr(watch, "observe", lambda command, **options: Observed([], code_told))
    done = typed("--try", "3", "--", "torchrun", "train.py")
    assert done.exit_code == code
    assert "note no GPU here" in done.stdout
    assert "watching took 1.2% of their time" in done.stdout
    ended = "The command ended with exit code -15; no problems found in torchrun train.py.\n"
    assert (ended in done.stdout) is note


def test_a_command_without_ranks_is_not_checked(typed, monkeypatch):
    """`doctor -- python empty.py` once reported 83 failures as checked."""
    nobody = watch.Observed([], 0, Path(), notes=(watch.NO_RANKS,))
    monkeypatch.setattr(watch, "observe", lambda command, **options: nobody)
    told = json.loads(typed("--json", "--", "python", "empty.py").stdout)
    assert told["checked"] == "nothing"
    assert told["notes"] == [watch.NO_RANKS]


def test_a_job_that_hangs(typed):
    done = typed("--attach", "4711")
    assert "error H03" in done.stdout
    assert "rank 1" in done.stdout


def test_json_is_one_object(typed):
    told = json.loads(typed("train.py", "--json").stdout)
    assert [(finding["id"], finding["line"]) for finding in told["findings"]] == [("G01", 1)]
    assert told["exit_code"] == 1
    assert told["fixed"] is None


@pytest.mark.parametrize(
    ("words", "goes_to"), [([], "out"), (["--json"], "err"), (["--sarif"], "err")]
)
def test_what_the_watched_command_prints_is_never_mixed_with_an_object(
    typed, capfd, words, goes_to
):
    done = typed(*words, "--", "torchrun", "train.py")
    assert getattr(capfd.readouterr(), goes_to) == "epoch 1\n"
    assert "paralab doctor: error G01" in done.stderr, "while it runs"


def test_fix_changes_the_script_and_looks_again(typed, tmp_path):
    done = typed("train.py", "--fix", "--json")
    told = json.loads(done.stdout)
    assert (tmp_path / "train.py").read_text() == "loss = f(x) / 4\nloss.backward()\n"
    assert done.exit_code == 0
    assert told["findings"] == []
    assert told["fixed"]["ids"] == ["G01"]
    assert "+loss = f(x) / 4" in told["fixed"]["files"]["train.py"]


def test_fix_says_what_it_changed(typed):
    done = typed("train.py", "--fix")
    assert "changed train.py\n" in done.stdout
    assert "+loss = f(x) / 4" in done.stdout
    assert "No problems found in train.py" in done.stdout


def test_a_comment_silences_also_what_was_seen_in_a_run(typed, tmp_path):
    (tmp_path / "train.py").write_text(
        "loss = f(x)  # paralab: ignore[G01] f divides\nloss.backward()\n"
    )
    for words in (["train.py"], ["--", "torchrun", "train.py"]):
        told = json.loads(typed("--json", *words).stdout)
        assert told["findings"] == []
        (ignored,) = told["ignored"]
        assert (ignored["id"], ignored["by"], ignored["reason"]) == ("G01", "comment", "f divides")


def test_a_comment_that_silences_nothing_is_told(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "checked_ids", lambda source: {"G01"})
    (tmp_path / "train.py").write_text("loss = f(x) / 4  # paralab: ignore[G01] f divides\n")
    done = typed("train.py")
    assert done.exit_code == 0
    assert "note train.py:1: ignore[G01] silences nothing" in done.stdout


@pytest.mark.parametrize(
    "words", [["--sarif", "train.py"], ["train.py", "--sarif"], ["train.py", "--sarif", "-"]]
)
def test_sarif_on_stdout(typed, words):
    told = json.loads(typed(*words).stdout)
    assert [result["ruleId"] for result in told["runs"][0]["results"]] == ["G01"]


def test_sarif_in_a_new_file(typed, tmp_path):
    done = typed("--sarif", "found.sarif", "train.py")
    assert "error G01" in done.stdout
    assert json.loads((tmp_path / "found.sarif").read_text())["version"] == "2.1.0"
    assert typed("--sarif", "found.sarif", "train.py").exit_code == 2
    assert (tmp_path / "train.py").read_text() == SCRIPT


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        (["--"], "`--`"),
        (["--try", "3", "train.py"], "--try needs"),
        (["--stall", "3"], "--stall needs"),
        (["--fix"], "--fix train.py"),
        (["train.py", "--attach", "3"], "a path and --attach"),
        (["train.py", "--", "torchrun"], "a path and -- COMMAND"),
        (["--explain", "G77"], "G01, G02"),
        (["--json", "--sarif", "-", "train.py"], "both print on stdout"),
        (["--format", "concise", "--json", "train.py"], "concise and json both print on stdout"),
        (["--format", "xml", "train.py"], "'xml' is not one of"),
        (["--select", "Q01", "train.py"], "There is no entry 'Q01'"),
        (["--baseline", "nowhere.json", "train.py"], "There is no baseline nowhere.json"),
        (["--write-baseline", "train.py"], "needs the name of a file"),
        (["--write-baseline"], "--write-baseline needs a script or a folder"),
        (["--try", "0", "--", "torchrun"], "--try 0 "),
        (["torchrun", "--nproc_per_node=2", "a.py"], "doctor -- torchrun --nproc_per_node=2 a.py"),
        (["--try", "3", "python", "a.py"], "doctor -- python a.py"),
    ],
)
def test_wrong_use(typed, words, problem):
    done = typed(*words)
    assert done.exit_code == 2
    assert problem in done.stderr
    assert done.asked == []


def test_links_that_lead_nowhere(typed, tmp_path):
    (tmp_path / "a.py").symlink_to("b.py")
    (tmp_path / "b.py").symlink_to("a.py")
    done = typed("a.py")
    assert done.exit_code == 2
    assert "a.py does not exist" in done.stderr


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"x = \0", "script.py is not valid Python"),
        (b"x = 1\ndef f(:\n", "script.py:2 is not valid Python"),
        (b"x = 0" + b" + 1" * 20_000, "script.py is nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, content, problem):
    path = tmp_path / "script.py"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="script") as told:
        Script(path)
    assert problem in str(told.value)


@pytest.mark.parametrize(
    "start", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*- \xe9\n", b"x = 1\n\x0c\n", b"x = 1\r\n"]
)
def test_a_script_is_read_as_python_reads_it(tmp_path, start):
    path = tmp_path / "script.py"
    path.write_bytes(start + b"import torch\nscaler = torch.amp.GradScaler()\n")
    script = Script(path)
    (call,) = script.calls_of("torch.amp.GradScaler")
    assert script.modules[0].lines[call.line - 1] == "scaler = torch.amp.GradScaler()"


def test_an_entry_is_explained(typed):
    done = typed("--explain", "h3")
    assert done.exit_code == 0
    for words in (
        "H03  A collective that only some ranks call",
        "symptom",
        "\n  + dist.all_reduce(loss)\n    if dist.get_rank() == 0:\n  -     dist.all_reduce(loss)\n",
    ):
        assert words in done.stdout
    assert json.loads(typed("--explain", "H03", "--json").stdout)["entries"][0]["id"] == "H03"
    listed = typed("--explain", "all").stdout
    assert listed.count("\n") == len(ENTRIES) + len({id[0] for id in ENTRIES})


@pytest.mark.processes
def test_reading_a_script_needs_neither_torch_nor_rich_and_is_quick(tmp_path):
    step = "def step{}(model, x):\n    loss = model(x).sum()\n    loss.backward()\n    return loss\n\n\n"
    body = "".join(step.format(number) for number in range(166))
    (tmp_path / "long.py").write_text("import torch\n\n" + body)
    assert 990 <= (tmp_path / "long.py").read_text().count("\n") <= 1010
    code = (
        "import sys, time; sys.argv = ['paralab', 'doctor', 'long.py', '--json']\n"
        "from paralab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'rich', 'numpy'} & sys.modules.keys(), sorted(sys.modules)\n"
        "assert time.process_time() < 1, time.process_time()\n"  # of the CPU, start of Python included: others may use it too
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)


@pytest.mark.processes
def test_the_command_is_attached(tmp_path):
    done = run_paralab("doctor", "--explain", "G01", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith("G01  The loss is not divided")


@pytest.mark.processes
def test_the_hook_checks_the_other_files_when_one_is_not_python(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "train.py").write_text((CORPUS / "H03" / "broken.py").read_text())
    command = [sys.executable, "-S", str(ROOT / "hooks" / "doctor.py"), "bad.py", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env={}
    )
    assert done.returncode == 1
    assert "bad.py:1 " in done.stderr
    assert "train.py:33: H03 error" in done.stdout


@pytest.mark.processes
def test_the_hook_needs_python_alone(tmp_path):
    """With -S, Python cannot import installed packages."""
    (tmp_path / "train.py").write_text("import torch\n")
    command = [sys.executable, "-S", str(ROOT / "hooks" / "doctor.py"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "train.py").write_text("def (\n")
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "train.py" in done.stderr
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert "id: paralab-doctor" in hook
    assert "entry: hooks/doctor.py" in hook
