"""Folders with random damage: the list always shows a row, and a run's page an explanation."""

import random
import shutil
from contextlib import suppress

import pytest

from paralab.serve import live_run
from paralab.serve.live_run import LiveRun
from paralab.serve.pages import list_parts, run_parts
from paralab.serve.problem import EXPECTED
from paralab.serve.runs import Listing
from tests.serve.conftest import RUNS

REPLACED = ((b"1", b"-1"), (b"0.", b"1e308"), (b'"step"', b'"stop"'), (b":", b""), (b"}", b"]"))


def damage(content, chance):
    """Cut the file, replace a byte, repeat a line, drop a line, or change numbers."""
    lines = content.splitlines(keepends=True)
    at, place = chance.randrange(len(content)), chance.randrange(len(lines))
    old, new = chance.choice(REPLACED)
    return chance.choice(
        (
            content[:at],
            content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
            b"".join(lines[: place + 1] + lines[place:]),
            b"".join(lines[:place] + lines[place + 1 :]),
            content[:at] + content[at:].replace(old, new, 3),
        )
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["ddp", "hybrid", "killed"])
def test_damage_never_breaks_a_page(tmp_path, monkeypatch, name, seed):
    monkeypatch.setattr(live_run, "is_running", lambda start: False)
    chance = random.Random(f"{name}{seed}")
    for number in range(6):
        folder = tmp_path / f"run{number}"
        shutil.copytree(RUNS / name, folder)
        files = [path for path in folder.rglob("*.json*") if path.stat().st_size]
        for path in chance.sample(files, k=min(2, len(files))):
            path.write_bytes(damage(path.read_bytes(), chance))
        with suppress(*EXPECTED):  # the page shows the explanation
            run_parts(LiveRun(tmp_path, folder.name).update())
    rows = Listing(tmp_path).read()
    assert len(list_parts(rows)["rows"]) == 6
