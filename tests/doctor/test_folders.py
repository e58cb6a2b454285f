"""`paralab doctor FOLDER`: which files it checks, what it finds, and that a bad file affects
only itself."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paralab.doctor import catalog, project_files, scripts
from paralab.doctor.diagnosis import accept_findings, check_paths
from paralab.doctor.globs import compile_patterns, is_excluded
from paralab.doctor.project_files import entry_points, python_files, trains_in_parallel
from paralab.doctor.settings import DEFAULT_OFF, Settings, parse_ids, read_settings
from paralab.doctor.show.lines import concise
from paralab.errors import UsageError
from tests.conftest import ROOT
from tests.doctor.cases import CORPUS

BROKEN = (CORPUS / "H03" / "broken.py").read_text()
PLAIN = "print('no training here')\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write a project. Paths are relative to the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def places(diagnosis):
    return [(finding.id, finding.file, finding.line) for finding in diagnosis.findings]


def names(paths, folder):
    return [path.relative_to(folder).as_posix() for path in paths]


# --- which files


@pytest.mark.parametrize(
    ("text", "is_parallel"),
    [
        ("import torch\nimport torch.distributed as dist\n", True),
        ("import torch\nmodel = torch.nn.DataParallel(model)\n", True),
        ("from accelerate import Accelerator\n", True),
        ("import torch\nscaler = torch.amp.GradScaler()\n", True),
        ("import torch\nmodel = torch.nn.Linear(2, 2)\n", False),
        ("import dask.distributed\n", False),
    ],
)
def test_only_files_that_train_in_parallel_are_checked(tmp_path, text, is_parallel):
    (tmp_path / "a.py").write_text(text)
    assert trains_in_parallel(tmp_path / "a.py") is is_parallel


IGNORE = "/out\n*.gen.py\n!keep.gen.py\n# a comment\n"
TREE = {
    "train.py": True,
    "src/net.py": True,
    "src/out/x.py": True,  # /out means only the folder at the top
    "out/x.py": False,
    "src/a.gen.py": False,
    "src/keep.gen.py": True,
    ".venv/lib/x.py": False,
    "env/pyvenv.cfg": False,
    "env/lib/x.py": False,
    "node_modules/x.py": False,
}


def make_tree(folder):
    for name in TREE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PLAIN)
    (folder / ".gitignore").write_text(IGNORE)


def test_ignored_files_and_environments_are_skipped_without_git(tmp_path):
    make_tree(tmp_path)
    expected = sorted(name for name, checked in TREE.items() if checked)
    assert names(python_files(tmp_path), tmp_path) == expected


@pytest.mark.processes
def test_git_lists_the_same_files(tmp_path):
    make_tree(tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert project_files._list_with_git(tmp_path)
    expected = sorted(name for name, checked in TREE.items() if checked)
    assert names(python_files(tmp_path), tmp_path) == expected
    assert names(python_files(tmp_path / "out"), tmp_path) == ["out/x.py"], "asked for by name"


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("tests", "tests/a.py", True),
        ("tests", "src/tests/a.py", True),
        ("/tests", "src/tests/a.py", False),
        ("tests/", "tests.py", False),
        ("*.py", "src/a.py", True),
        ("src/*.py", "src/a.py", True),
        ("src/*.py", "src/deep/a.py", False),
        ("src/**/a.py", "src/deep/er/a.py", True),
        ("src/**", "src/deep/a.py", True),
        ("a[0-9].py", "a7.py", True),
        ("a[!0-9].py", "a7.py", False),
        ("a?.py", "ab.py", True),
        ("a.py", "xa.py", False),
    ],
)
def test_patterns_work_as_in_gitignore(pattern, path, matches):
    assert is_excluded(path, compile_patterns([pattern])) is matches


def test_modules_are_checked_with_the_scripts_that_import_them(project):
    folder = project(
        {
            "train.py": "from pkg.engine import run\n",
            "tool.py": "import engine2 as e\n",
            "pkg/__init__.py": "",
            "pkg/engine.py": "from . import util\nfrom .loop import (\n    a,\n    b as c,\n)\n",
            "pkg/util.py": "",
            "pkg/loop.py": "if __name__ == '__main__':\n    pass\n",
            "engine2.py": "import engine2\n",
        }
    )
    found = entry_points(sorted(folder.rglob("*.py")))
    assert names(found, folder) == ["pkg/__init__.py", "pkg/loop.py", "tool.py", "train.py"]


def test_a_guard_in_another_file_counts(project):
    """On its own, save.py seems to save to one file on every rank. Its only caller checks the
    rank."""
    project(
        {
            "save.py": (
                "import torch\nimport torch.distributed as dist\n\n\n"
                "def save(model):\n    torch.save(model.state_dict(), 'last.pt')\n"
            ),
            "train.py": (
                "import torch.distributed as dist\nfrom save import save\n\n"
                "dist.init_process_group('gloo')\nmodel = make()\n"
                "if dist.get_rank() == 0:\n    save(model)\ndist.destroy_process_group()\n"
            ),
        }
    )
    assert places(check_paths([Path()])) == []


def test_scripts_without_an_optimizer_are_checked(project):
    project(
        {
            "evaluate.py": (
                "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
                "if dist.get_rank() == 0:\n    dist.barrier()\ndist.destroy_process_group()\n"
            )
        }
    )
    assert places(check_paths([Path()])) == [("H03", "evaluate.py", 5)]


# --- one bad file


def test_a_file_that_cannot_be_analyzed_costs_one_line(project):
    project({"train.py": BROKEN, "old.py": "import torch.distributed\nprint 'python 2'\n"})
    diagnosis = check_paths([Path()])
    assert [finding.id for finding in diagnosis.findings] == ["H03"]
    (failure,) = diagnosis.failures
    assert str(failure).startswith("old.py:2 is not ")
    assert "\n" not in str(failure)
    assert diagnosis.exit_code() == 1


def test_a_check_that_raises_costs_one_line(project, monkeypatch):
    def broken_check(script):
        raise KeyError("x\ny")

    every = catalog.registered["script"]
    monkeypatch.setitem(catalog.registered, "script", {broken_check: ("S01",), **every})
    project({"train.py": BROKEN})
    diagnosis = check_paths([Path("train.py")])
    assert [finding.id for finding in diagnosis.findings] == ["H03"]
    (failure,) = diagnosis.failures
    assert str(failure).startswith("train.py: check S01 broken_check failed: KeyError: ")
    with pytest.raises(KeyError):
        catalog.apply("script", scripts_subject())


def scripts_subject():
    from paralab.doctor.static.script import Script

    return Script(Path("train.py"))


def never_ends(script):
    while script.path.name == "large.py":
        pass


def goes_deep(script):
    if script.path.name == "large.py":
        goes_deep(script)


@pytest.mark.parametrize(
    ("slow_check", "reason"),
    [(never_ends, "the analysis takes more than 0.5 s"), (goes_deep, "it is nested too deeply")],
)
def test_a_script_that_is_too_large_costs_one_line(slow_check, reason, project, monkeypatch):
    every = catalog.registered["script"]
    monkeypatch.setitem(catalog.registered, "script", {slow_check: ("S01",), **every})
    monkeypatch.setattr(scripts, "MOST_SECONDS", 0.5)
    project({"large.py": BROKEN, "train.py": BROKEN})
    diagnosis = check_paths([Path()])
    assert [place[:2] for place in places(diagnosis)] == [("H03", "train.py")]
    problem = f"large.py is too large to analyze: {reason}."
    assert [str(one) for one in diagnosis.failures] == [problem]


@pytest.mark.processes
def test_several_processes_find_the_same(project, monkeypatch):
    folder = project({f"train{number}.py": BROKEN for number in range(6)})
    (folder / "bad.py").write_text("import torch.distributed\ndef f(:\n")
    alone = check_paths([Path()])
    monkeypatch.setattr(scripts, "FILES_PER_PROCESS", 2)
    monkeypatch.setattr(scripts, "usable_cores", lambda: 2)
    together = check_paths([Path()])
    assert len(places(alone)) == 6
    assert places(together) == places(alone)
    assert together.failures == alone.failures


# --- the working directory


@pytest.mark.parametrize(
    "script", sorted(CORPUS.glob("*/variant_trainer/train.py")), ids=lambda path: path.parts[-3]
)
def test_the_working_directory_does_not_change_the_answer(script, tmp_path, monkeypatch):
    shutil.copytree(script.parent, tmp_path / "trainer")

    def answer(folder, path):
        monkeypatch.chdir(folder)
        return {
            (each.id, each.severity, os.path.realpath(each.file), each.line, each.why)
            for each in check_paths([Path(path)]).findings
        }

    inside = answer(tmp_path / "trainer", "train.py")
    assert inside
    assert answer(tmp_path, "trainer/train.py") == inside
    assert answer(tmp_path.parent, f"{tmp_path.name}/trainer/train.py") == inside
    assert answer(Path("/"), tmp_path / "trainer" / "train.py") == inside


# --- which findings


def test_ids_groups_and_all():
    assert parse_ids(["h3,G01"]) == {"H03", "G01"}
    assert parse_ids(["G"]) == {id for id in catalog.ENTRIES if id[0] == "G"}
    assert parse_ids(["ALL"]) == set(catalog.ENTRIES)
    with pytest.raises(UsageError, match="There is no entry"):
        parse_ids(["X1"])


def test_the_noisiest_failures_are_off_and_counted(project):
    project({"train.py": (CORPUS / "H17" / "broken.py").read_text()})
    assert {"H17"} == DEFAULT_OFF
    by_default = check_paths([Path("train.py")], read_settings([Path("train.py")]))
    assert places(by_default) == []
    assert by_default.hidden == {"H17": 1}
    assert any(line.endswith("Try: --select H17") for line in by_default.summary(False))
    for select in (["H17"], ["ALL"], ["H"]):
        chosen = check_paths([Path("train.py")], read_settings([Path("train.py")], select=select))
        assert "H17" in [finding.id for finding in chosen.findings]
        assert chosen.hidden == {}
    ignored = check_paths([Path("train.py")], read_settings([Path("train.py")], ignore=["H17"]))
    assert (places(ignored), ignored.hidden) == ([], {})


SETTINGS = """
[tool.paralab.doctor]
select = ["H", "G"]
ignore = ["G01"]
exclude = ["old"]
baseline = "accepted.json"
per-file-ignores = { "tests/**" = ["H03"] }
"""


def test_pyproject_is_found_from_the_files_not_from_the_working_directory(project, monkeypatch):
    folder = project({"pyproject.toml": SETTINGS, "src/train.py": BROKEN})
    monkeypatch.chdir("/")
    settings = read_settings([folder / "src" / "train.py"], ignore=["H02"], exclude=["new"])
    assert settings.root == folder
    assert settings.select == {id for id in catalog.ENTRIES if id[0] in "HG"} - {"G01", "H02"}
    assert settings.exclude == ("old", "new")
    assert settings.baseline == folder / "accepted.json"
    assert settings.excludes(folder / "src" / "old" / "x.py")
    assert not settings.excludes(folder / "src" / "older" / "x.py")
    assert settings.pattern_for("H03", folder / "tests" / "deep" / "a.py") == "tests/**"
    assert settings.pattern_for("H03", folder / "src" / "train.py") is None
    assert read_settings([folder], select=["G01"]).select == {"G01"}, "the command line wins"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('selct = ["H03"]', "Did you mean 'select'?"),
        ('select = "H03"', "'select' must be a list of strings"),
        ("baseline = 3", "'baseline' must be the name of a file"),
        ('select = ["X99"]', "There is no entry 'X99'"),
        ("select = [", "is not valid TOML"),
    ],
)
def test_wrong_settings_are_usage_errors(project, line, problem):
    project({"pyproject.toml": f"[tool.paralab.doctor]\n{line}\n"})
    with pytest.raises(UsageError) as error:
        read_settings([Path()])
    assert problem in str(error.value)


def test_per_file_ignores_and_exclude(project):
    table = '[tool.paralab.doctor]\nexclude = ["old"]\nper-file-ignores = {"tests/" = ["H03"]}\n'
    project(
        {
            "pyproject.toml": table,
            "train.py": BROKEN,
            "tests/train.py": BROKEN,
            "old/train.py": BROKEN,
        }
    )
    diagnosis = check_paths([Path()], read_settings([Path()]))
    assert [finding.file for finding in diagnosis.findings] == ["train.py"]
    assert [(each.finding.file, each.by) for each in diagnosis.ignored] == [
        ("tests/train.py", "per-file-ignores")
    ]
    assert "1 file excluded" in diagnosis.checked


# --- the baseline


def test_a_baseline_hides_what_it_accepts_and_nothing_new(project):
    folder = project({"train.py": BROKEN})
    settings = read_settings([Path()], baseline=Path("accepted.json"))
    accepted = accept_findings([Path()], settings)
    assert accepted.notes == ("Wrote 1 finding to accepted.json.",)
    assert places(accepted) == []
    assert [each.by for each in accepted.ignored] == ["baseline"]
    (row,) = json.loads((folder / "accepted.json").read_text())["findings"]
    assert (row["id"], row["file"], row["count"]) == ("H03", "train.py", 1)

    (folder / "train.py").write_text("# moved down\n" + BROKEN)
    assert places(check_paths([Path()], settings)) == []
    mark = next(line for line in BROKEN.splitlines(keepends=True) if "# finds H03" in line)
    (folder / "train.py").write_text(BROKEN.replace(mark, mark + mark))
    assert len(places(check_paths([Path()], settings))) == 1, "one entry accepts one finding"
    (folder / "train.py").write_text(BROKEN.replace(mark, ""))
    (note,) = check_paths([Path()], settings).notes
    assert note.startswith("accepted.json: 1 entry no longer needed")


def test_only_a_baseline_is_overwritten(project):
    folder = project({"train.py": BROKEN, "train.json": '{"lr": 1}\n'})
    with pytest.raises(UsageError, match="not a baseline"):
        accept_findings([Path()], Settings(baseline=Path("train.json")))
    assert (folder / "train.json").read_text() == '{"lr": 1}\n'


# --- the command


@pytest.mark.processes
def test_the_command_checks_a_folder(project):
    folder = project({"train.py": BROKEN, "other.py": PLAIN})

    def run(*words):
        command = [sys.executable, "-m", "paralab", "doctor", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    done = run(".", "--format", "concise")
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line == concise(check_paths([Path()]), False)[0]
    assert line.startswith("train.py:33: H03 error ")
    assert "1 error." in done.stderr
    assert run(".", "--exit-zero").returncode == 0
    assert run(".", "--ignore", "H").returncode == 0
    assert run(".", "--exclude", "train.py").returncode == 0
    assert run("--format", "github", ".").stdout.startswith("::error file=train.py,line=33,")


def test_a_notebook_is_not_a_log_without_problems(project):
    project({"train.ipynb": "{}"})
    with pytest.raises(UsageError, match="notebook"):
        check_paths([Path("train.ipynb")])


def test_a_pipe_next_to_a_script_is_not_read(project):
    # Nothing ever writes to this pipe, so the doctor once waited forever.
    script = project({"train.py": BROKEN}) / "train.py"
    os.mkfifo(script.with_name("events.py"))
    checking = threading.Thread(target=check_paths, args=([script],), daemon=True)
    checking.start()
    checking.join(60)
    assert not checking.is_alive()


def test_a_folder_of_tests_fails_on_purpose(project):
    # A test of a watchdog makes one rank leave.
    top = project({"train.py": BROKEN, "tests/ddp/hang.py": BROKEN})
    found = {(Path(one.file).name, one.severity) for one in check_paths([Path()]).findings}
    assert found == {("train.py", "error"), ("hang.py", "suspect")}
    (alone,) = check_paths([top / "tests" / "ddp"]).findings
    assert alone.severity == "error"
