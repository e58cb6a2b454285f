"""The design's import rules hold for every file: earlier layers only, no torch in the reading
half, no cycles."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paralab"
ROOT_MODULES = {"__init__", "__main__", "api", "errors", "units"}

# The subpackages that each subpackage may import, at the top of a file or inside a function.
ALLOWED = {
    "machine": set(),
    "workload": set(),
    "plan": {"machine", "workload"},  # their plain numbers: Machine, Probe, Summary
    "record": set(),
    "collectives": set(),  # works without the rest of paralab
    "launch": {"machine", "workload", "plan", "record"},
    "worker": {"collectives", "machine", "workload", "plan", "record"},
    # machine: peak rates; plan: the ideal order of a schedule; workload: its plain numbers
    "analyse": {"machine", "plan", "record", "workload"},
    "course": {"analyse", "experiment", "machine", "plan", "record", "workload"},
    "show": {"analyse", "course", "machine", "plan", "record", "workload"},
    "experiment": {"analyse", "launch", "machine", "plan", "record", "show", "workload"},
    "serve": {"analyse", "course", "doctor", "machine", "plan", "record", "show"},
    "observe": {"record"},  # runs inside the ranks of scripts that do not use paralab
    "doctor": {"analyse", "machine", "plan", "record", "show"},
    "cli": {
        "analyse",
        "course",
        "doctor",
        "experiment",
        "launch",
        "machine",
        "plan",
        "record",
        "serve",
        "show",
    },
    "__init__": {"api", "workload"},
    "__main__": {"cli"},
    "api": {"course", "analyse", "experiment", "launch", "plan", "record", "show", "workload"},
    "errors": set(),
    "units": set(),
}
EVERYWHERE = {"errors", "units"}
WITHOUT_TORCH = set(ALLOWED) - {"worker", "workload", "observe", "collectives"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "paralab":
                yield from (
                    f"paralab.{alias.name}" for alias in node.names if alias.name != "__version__"
                )
            else:
                yield node.module


def test_only_the_public_interface_is_at_the_root():
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOT_MODULES


def test_every_file_imports_only_what_the_design_allows():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports(path):
            parts = name.split(".")
            allowed = {own, *ALLOWED[own], *EVERYWHERE}
            if parts[0] == "paralab" and parts[1:2] and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
            if parts[0] == "torch" and own in WITHOUT_TORCH:
                wrong.append(f"{path.relative_to(PACKAGE)} imports torch")
    assert not wrong, "\n".join(wrong)


def test_the_training_half_needs_torch_and_the_standard_library_alone():
    """Only the launching and the reading half may use modules that need psutil or msgspec."""
    others = {
        *(PACKAGE / "machine" / f"{name}.py" for name in ("processes", "mps")),
        *(PACKAGE / "record" / f"{name}.py" for name in ("events", "reader", "types")),
    }
    unwanted = r"machine(\.| import )(processes|mps)\b|record(\.| import )(events|reader|types)\b"
    known = {"paralab", "torch", "__future__", *sys.stdlib_module_names}
    for package in ("worker", "workload", "plan", "record", "machine", "observe"):
        for path in (PACKAGE / package).glob("**/*.py"):
            if path not in others:
                assert {name.split(".")[0] for name in imports(path)} <= known, path
                assert not re.search(unwanted, path.read_text()), path


def test_sub_packages_are_empty():
    # torch expects that importing a backend's package registers it.
    paths = set(PACKAGE.glob("*/**/__init__.py")) - {PACKAGE / "collectives" / "__init__.py"}
    assert all(path.read_text() == "" for path in paths)


@pytest.mark.processes
def test_importing_and_helping_does_not_import_torch():
    packages = ("show", "serve") if find_spec("starlette") else ("show",)
    shown = ", ".join(
        f"paralab.{name}.{path.stem}"
        for name in packages
        for path in (PACKAGE / name).glob("[a-z]*.py")
    )
    names = f"paralab.cli.main, paralab.experiment.verify, paralab.experiment.compare, {shown}"
    code = f"import sys, paralab, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


@pytest.mark.processes
def test_looking_at_a_workload_does_not_load_the_compiler():
    """Importing torch takes a second of every command. In a rank, `import paralab` does not load
    what starts ranks either."""
    code = """
import sys
from paralab.worker.inspection.inspect_workload import inspect_workload
from paralab.workload.summary import Inspection
found = inspect_workload(Inspection("gpt:tiny", "cpu", threads=1, layers=True, units=True))
assert (found.optimizer, found.optimizer_bytes_per_byte) == ("SGD", 1.0)
sys.exit(" ".join({"torch._dynamo", "paralab.api"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stderr.strip() == ""
