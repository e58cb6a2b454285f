"""`pip install .` is enough: with the wheel, torch, and the declared dependencies, the commands in
README and docs/tour.md run. numpy was once not declared. In a plain install, verify, compare, and
--checkpoint failed in the ranks, and no test noticed, because the test environment has numpy."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from paralab.launch.processes import SHARED
from tests.conftest import ROOT
from tests.page_commands import DRIVER, TUTORIALS, check_commands, commands_of, runnable

pytestmark = pytest.mark.processes

UNDECLARED = ("pytest", "transformers", "cloudpickle", "tensorboard", "starlette", "uvicorn")
SECONDS = 500  # only ends a test that would wait forever


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
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", SHARED)  # ranks, too, use this environment
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


def test_the_commands_of_readme_and_tour_run_in_a_plain_install(plain, tmp_path):
    pages = "".join(page.read_text() for page in TUTORIALS)
    words = runnable(pages).values()
    everyday = "list env run verify compare plan scale show checkpoint doctor"
    assert {first for first, *_ in words} >= set(everyday.split())
    assert any("--resume" in each for each in words)
    (snippet,) = re.findall(r"```python\n(import paralab\n.*?)```", pages, re.DOTALL)
    snippet = re.sub(r"(paralab\.compare\(.*)\)", r"\1, rounds=1, steps=2, prove=False)", snippet)

    named, given = commands_of(TUTORIALS, tmp_path)
    given = json.dumps([given, snippet])
    done = run(plain, tmp_path, str(plain), "-P", "-c", DRIVER, input=given)
    check_commands(named, done)


def test_serve_names_the_extra_that_it_needs(plain, tmp_path):
    done = run(plain, tmp_path, "paralab", "serve")
    assert done.returncode == 2
    assert 'pip install "paralab[web]"' in done.stderr


def test_the_console_command_is_installed(plain, tmp_path):
    assert run(plain, tmp_path, "paralab", "list").returncode == 0
