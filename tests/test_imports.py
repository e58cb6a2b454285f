"""The design's import rules: stages import earlier stages' types only, the reading half never imports torch, no cycles."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "paralab"

# Which sub-packages a sub-package may import. `machine` and `plan` are plain numbers; only `worker` and `workload` know torch.
ALLOWED = {
    "machine": set(),
    "workload": set(),
    "plan": {"machine", "workload"},  # their plain numbers: Machine, Probe, Summary
    "record": set(),
    "worker": {"machine", "workload", "plan", "record"},
    "launch": {"machine", "workload", "plan", "record"},
    "analyse": {"record", "machine", "plan"},  # machine: the peaks of known devices; plan: the ideal order of a schedule
    "show": {"plan", "record", "workload", "analyse", "doctor"},
    "observe": {"record"},  # lives in the ranks of a foreign script
    "doctor": {"machine", "record", "plan", "analyse"},
}
WITHOUT_TORCH = ("machine", "plan", "record", "launch", "analyse", "show", "doctor")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def test_stages_import_only_what_the_design_allows():
    wrong = []
    for path in PACKAGE.glob("*/**/*.py"):
        own = path.relative_to(PACKAGE).parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "paralab" and parts[1:2] and parts[1] not in {own, *ALLOWED[own], "errors", "signals", "units"}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
            if parts[0] == "torch" and own in WITHOUT_TORCH:
                wrong.append(f"{path.relative_to(PACKAGE)} imports torch")
    assert not wrong, wrong


def test_the_training_half_needs_torch_and_the_standard_library_alone():
    for package in ("worker", "workload", "plan", "record", "machine", "observe"):
        for path in (PACKAGE / package).glob("**/*.py"):
            known = {"paralab", "torch", "__future__", *sys.stdlib_module_names}
            assert {name.split(".")[0] for name in imports(path)} <= known, path


def test_sub_packages_are_empty():
    assert all(path.read_text() == "" for path in PACKAGE.glob("*/**/__init__.py"))


def test_importing_and_helping_does_not_import_torch():
    shown = ", ".join(f"paralab.show.{path.stem}" for path in (PACKAGE / "show").glob("[a-z]*.py"))
    code = f"import sys, paralab, paralab.cli, paralab.proof, paralab.comparison, {shown}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_looking_at_a_workload_does_not_load_the_compiler():
    """It takes a second, of every command; `import paralab` in a rank does not load what starts ranks either."""
    code = """
import sys
from paralab.worker.inspection import look_at_workload
found = look_at_workload("gpt:tiny", "cpu", layers=True, samples=None, threads=1, units=True)
assert (found.optimizer, found.optimizer_bytes_per_byte) == ("SGD", 1.0)
sys.exit(" ".join({"torch._dynamo", "paralab.api"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""
