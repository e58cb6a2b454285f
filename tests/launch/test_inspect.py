"""The process that inspects a workload: user code that asks a question, or ends the process."""

import pytest

from paralab.errors import ParalabError
from paralab.launch.inspect import inspect_workload
from paralab.machine.signals import describe_exit
from paralab.workload.summary import Inspection

FILE = """
import os, signal

def asks():
    return input("Continue? ")

def dies():
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize(
    ("code", "words"), [(3, "code 3"), (0, "code 0"), (-11, "SIGSEGV"), (-2, "SIGINT")]
)
def test_how_a_process_ended(code, words):
    assert describe_exit(code).endswith(words)


@pytest.mark.processes
@pytest.mark.parametrize(("function", "problem"), [("asks", "EOFError"), ("dies", "SIGSEGV")])
def test_a_workload_that_asks_or_dies_is_an_error(tmp_path, function, problem):
    """`input` and `breakpoint` once waited ten minutes for orders from the launcher."""
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ParalabError, match=problem) as failed:
        inspect_workload(Inspection(f"{tmp_path}/mine.py:{function}", "cpu"))
    assert failed.value.fix or "input" in failed.value.detail
