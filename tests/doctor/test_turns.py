"""Turns of a loop: when a window's step is taken, and when no_sync is open, turn by turn."""

import pytest

from paralab.doctor.script.questions import UNKNOWN
from paralab.doctor.script.reading import read_script
from paralab.doctor.script.turns import happens, is_under, length
from paralab.doctor.script.updates import backwards, windows

START = """
import contextlib, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
model = DistributedDataParallel(nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.zeros(20, 2)), batch_size=2)
n = 4
"""


def window_of(code, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(START + code)
    (window,) = windows(read_script(path))
    return window


def drawn(happening, window, turns):
    """× where it happens, · where it does not, ? where nobody knows."""
    shown = {True: "×", False: "·", UNKNOWN: "?"}
    return "".join(shown[happens(happening, turn)] for turn in turns)


# Two windows of four turns (of three where the size is not known), and two turns after them.
GUARDS = {
    "(i + 1) % n == 0": "···×···×··",
    "not (i + 1) % n": "···×···×··",
    "i % n == n - 1 or i == len(loader) - 1": "···×···×·×",
    "(i + 1) % n == 0 and sys.argv[1]": "···?···?··",
    "(i + 1) % int(sys.argv[1]) == 0": "··×··×··",
}
LOOPS = {
    "enumerate from one": ("for i, (x,) in enumerate(loader, 1):", "    if i % n == 0:"),
    "left out by continue": (
        "for i, (x,) in enumerate(loader):",
        "    if (i + 1) % n:\n        continue\n    if True:",
    ),
    "a counter": ("k = 0\nfor (x,) in loader:", "    k += 1\n    if k % n == 0:"),
    "a counter that starts again": (
        "k = 0\nfor (x,) in loader:",
        "    k = k + 1\n    if k == n:\n        k = 0",
    ),
    "a range": ("for i in range(100):\n    x = torch.zeros(2, 2)", "    if not (i + 1) % n:"),
    "an attribute": (
        "class T:\n    k = 0\nt = T()\nfor (x,) in loader:",
        "    t.k += 1\n    if t.k % n == 0:",
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_when_a_guard_is_taken(guard, tmp_path):
    code = f"for i, (x,) in enumerate(loader):\n    model(x).mean().backward()\n    if {guard}:\n        opt.step()\n"
    window = window_of(code, tmp_path)
    assert drawn(window.step, window, window.turns(2)) == GUARDS[guard]


@pytest.mark.parametrize("name", LOOPS)
def test_counters_of_every_kind(name, tmp_path):
    head, guard = LOOPS[name]
    window = window_of(
        f"{head}\n    model(x).mean().backward()\n{guard}\n        opt.step()\n", tmp_path
    )
    assert drawn(window.step, window, window.turns(2)) == "···×···×··"


def test_no_sync_is_open_where_no_step_follows(tmp_path):
    code = """
for i, (x,) in enumerate(loader):
    last = (i + 1) % n == 0 or i + 1 == len(loader)
    with contextlib.nullcontext() if last else model.no_sync():
        (model(x).mean() / n).backward()
    if last:
        opt.step()
"""
    window = window_of(code, tmp_path)
    turns = window.turns(2)
    quiet = "".join(
        "×" if is_under(window.backward.call, "no_sync", turn) is True else "·" for turn in turns
    )
    assert drawn(window.step, window, turns) == "···×···×·×"
    assert quiet == "×××·×××·×·"


LENGTHS = {
    "(1, 2)": 2,
    "range(3, 11)": 8,
    "[f(i) for i in range(6)]": 6,
    "loader": 10,
    "torch.zeros(5, 3).float()": 5,
    "f()": None,
}


@pytest.mark.parametrize("code", LENGTHS)
def test_lengths_that_a_script_tells(code, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(START + f"from lib import f\nmodel(0).mean().backward({code})\n")
    (backward,) = backwards(read_script(path))
    assert length(backward.call.args[0]) == LENGTHS[code]
