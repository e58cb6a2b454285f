"""`pip install .` is enough: with the wheel, torch, and the declared dependencies, the commands in
README and docs/tour.md run. numpy was once not declared. In a plain install, verify, compare, and
--checkpoint failed in the ranks, and no test noticed, because the test environment has numpy."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

pytestmark = pytest.mark.processes

UNDECLARED = ("pytest", "transformers", "cloudpickle", "tensorboard", "starlette", "uvicorn")
# Commands that we do not run: they take minutes, need an extra or the reader's own file, or check
# this machine.
SKIPPED = (
    r"practical|tune|serve|huggingface|--stall|(run|doctor)$|--attach|job\.log|PID|FILE|FOLDER"
)
SHORTER = (
    (r"--workload gpt(?![:\w])", "--workload gpt:tiny"),
    (r"(?<=--steps )\d+", lambda found: str(min(int(found[0]), int(found[0]) // 50 + 2))),
    (r"--checkpoint-every \d+", "--checkpoint-every 2"),
    (r"--tensorboard \S+", ""),  # an extra
    (r"verify all", "verify ddp --steps 2"),
    (r"1,2,4", "1,2"),
    (r"compare --all", "compare"),  # 35 configurations
    (r"compare --workload", "compare single ddp --workload"),
    (r"(compare|scale)(.*)", r"\1\2 --rounds 1 --steps 2 --no-proof"),
)
SECONDS = 200


def commands(text):
    """Return a page's commands in order, from lines of code blocks and code spans."""
    in_block, found = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            in_block = not in_block
        elif in_block and line.removeprefix("$ ").startswith("paralab "):
            found.append(re.split(r"\s+#", line.removeprefix("$ "))[0])
        elif not in_block:
            found += [
                command for command in re.findall(r"`(paralab [^`]+)`", line) if "…" not in command
            ]
    return list(dict.fromkeys(found))


def shorter(command):
    for pattern, instead in SHORTER:
        command = re.sub(pattern, instead, command)
    return command


def closure(names):
    """Return the distributions that these need, without extras, as pip would install them on this
    machine."""
    found, waiting = {}, [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            found[wanted.name] = distribution(wanted.name)
        except PackageNotFoundError:
            pytest.fail(f"{wanted} is declared, and not installed here")
        waiting += [Requirement(name) for name in found[wanted.name].requires or []]
    return found.values()


def link(package, site):
    """Link an installed distribution into another environment."""
    tops = {path.parts[0] for path in package.files or []} - {"..", "__pycache__"}
    for top in tops:
        if not (site / top).exists():
            (site / top).symlink_to(Path(package.locate_file(top)).resolve())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Create an environment with paralab's wheel and its declared dependencies, which are linked
    instead of downloaded."""
    folder = tmp_path_factory.mktemp("plain")
    source = folder / "source"
    shutil.copytree(
        ROOT / "paralab", source / "paralab", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("practicals", "examples"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=SECONDS
    )
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=SECONDS
    )
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=SECONDS)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (metadata,) = site.glob("paralab-*.dist-info/METADATA")
    declared = re.findall(r"^Requires-Dist: (.+)$", metadata.read_text(), re.MULTILINE)
    for package in closure(name for name in declared if "extra ==" not in name):
        link(package, site)
    return python


def run(python, room, *command, input=None):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command,
        cwd=room,
        env=environment,
        input=input,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_only_what_is_declared_is_there(plain, tmp_path):
    code = (
        f"import importlib.util as u; print([name for name in {UNDECLARED!r} if u.find_spec(name)])"
    )
    assert run(plain, tmp_path, str(plain), "-c", code).stdout == "[]\n"


# Importing torch takes most of the time. So all commands run in one process, and a process that has
# imported torch forks their ranks.
DRIVER = """
import contextlib, io, json, sys
from pathlib import Path
import paralab.api
from paralab.cli import main as cli
from paralab.launch.processes import import_torch_once

cli.import_torch_once = paralab.api.import_torch_once = contextlib.nullcontext
commands, snippet = json.load(sys.stdin)
ended = []
with import_torch_once():
    for words in commands:
        runs = sorted(Path("runs").glob("*"), key=lambda path: path.stat().st_mtime)
        words = [str(runs[-1]) if word == "runs/…" else word for word in words]
        sys.argv = ["paralab", *words]
        said, code = io.StringIO(), 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                cli.main(words, standalone_mode=False)
            except SystemExit as end:
                code = end.code
        ended.append((code or 0, said.getvalue()))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(snippet)
json.dump(ended, sys.stdout)
"""


def test_the_commands_of_readme_and_tour_run_in_a_plain_install(plain, tmp_path):
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/tour.md")]
    (workload,) = re.findall(r"```python\n# mine\.py\n(.*?)```", "".join(pages), re.DOTALL)
    (tmp_path / "mine.py").write_text(workload)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "train_with_ddp.py", tmp_path / "train.py")
    shutil.copy(ROOT / "tests/doctor/corpus/H08/broken.py", tmp_path)

    named = dict.fromkeys(command for page in pages for command in commands(page))
    kept = [command for command in named if not re.search(SKIPPED, command)]
    words = [shlex.split(shorter(command))[1:] for command in kept]
    everyday = "list env run verify compare plan scale show checkpoint doctor"
    assert {first for first, *_ in words} >= set(everyday.split())
    assert any("--resume" in command for command in words)

    (snippet,) = re.findall(r"```python\n(import paralab\n.*?)```", "".join(pages), re.DOTALL)
    snippet = re.sub(r"(paralab\.compare\(.*)\)", r"\1, rounds=1, steps=2, prove=False)", snippet)

    given = json.dumps([words, snippet])
    done = run(plain, tmp_path, str(plain), "-P", "-c", DRIVER, input=given)
    assert done.returncode == 0, done.stderr
    for command, (code, printed) in zip(kept, json.loads(done.stdout), strict=True):
        finding = command.startswith("paralab doctor") and code == 1
        assert code == 0 or finding, f"{command}\n{printed}"
        assert "Traceback" not in printed, command


def test_serve_names_the_extra_that_it_needs(plain, tmp_path):
    done = run(plain, tmp_path, "paralab", "serve")
    assert done.returncode == 2
    assert 'pip install "paralab[web]"' in done.stderr


def test_the_console_command_is_installed(plain, tmp_path):
    assert run(plain, tmp_path, "paralab", "list").returncode == 0
