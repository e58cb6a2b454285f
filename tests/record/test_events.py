"""Writing events never blocks, events survive a killed process, and the reader tolerates damage."""

import json
import os

import pytest

from paralab.errors import UsageError
from paralab.record import reader
from paralab.record.events import Step
from paralab.record.folder import SCHEMA_VERSION, RunFolder
from paralab.record.reader import Tail, parse, read_events
from paralab.record.types import read_object
from paralab.record.writer import EventWriter


def step(number):
    times = {"start": float(number), "end": number + 1.0}
    return {"event": "step", "step": number, **times, "samples": 4, "loss": 0.5}


def test_written_events_are_read_back(tmp_path):
    (tmp_path / "events").mkdir()
    for rank in (0, 1, 10):
        writer = EventWriter(tmp_path / "events" / f"rank{rank}.jsonl")
        writer.write([step(number) for number in range(3)])
        writer.write([{"event": "end", "time": 3.0, "status": "completed"}])
        writer.close()
    found = read_events(tmp_path)
    assert list(found) == [0, 1, 10]
    assert [event.event for event in found[10]] == ["step", "step", "step", "end"]
    assert found[10][1] == Step(**step(1))


def test_a_truncated_line_is_read_once_it_is_complete(tmp_path):
    path = tmp_path / "rank0.jsonl"
    tail = Tail(path, parse)
    assert tail.new() == []
    first, second = (json.dumps(step(number)) for number in (0, 1))
    path.write_text(f"{first}\n{second[:12]}")
    assert [event.step for event in tail.new()] == [0]
    with path.open("a") as file:
        file.write(f'{second[12:]}\nrubbish\n{{"event":"end","time":2,"status":"failed"}}\n')
    assert [event.event for event in tail.new()] == ["step", "end"]
    assert tail.damaged == 1


def test_a_file_is_read_in_parts_and_an_endless_line_only_once(tmp_path, monkeypatch):
    """A file without line ends once filled the memory, and a live page read it again every time."""
    path, line = tmp_path / "rank0.jsonl", json.dumps(step(0)) + "\n"
    monkeypatch.setattr(reader, "READ_BYTES", 2 * len(line) + 5)
    path.write_text(5 * line + 3 * len(line) * "0")
    tail = Tail(path, parse)
    assert len(tail.new()) == 5
    assert tail._position > 7 * len(line)
    with path.open("a") as file:
        file.write("\n" + line)
    assert len(tail.new()) == 1
    assert tail.new() == []


def test_existing_files_are_not_overwritten(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "")
    EventWriter(folder.events / "rank0.jsonl").close()
    with pytest.raises(FileExistsError):
        EventWriter(folder.events / "rank0.jsonl")
    with pytest.raises(UsageError, match="--out"):
        RunFolder.create(tmp_path / "run", "")


def test_default_folders_get_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "2026-01-01_00-00-00_")
    assert [RunFolder.create(None, "ddp").path.name for _ in range(3)] == [
        "2026-01-01_00-00-00_ddp",
        "2026-01-01_00-00-00_ddp_2",
        "2026-01-01_00-00-00_ddp_3",
    ]


def test_the_manifest_makes_a_run_reproducible(tmp_path):
    folder = RunFolder.create(tmp_path / "run", "")
    folder.write_manifest(plan={"strategy": "ddp"}, data_path="here", constraints=["4 cores"])
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["schema"] == SCHEMA_VERSION
    assert manifest["packages"]["torch"]
    assert {"created", "command", "folder", "plan", "data_path", "constraints"} <= manifest.keys()


def test_a_folder_of_runs_names_its_newest(tmp_path):
    for number, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        os.utime(tmp_path / name / "manifest.json", (number, number))
    with pytest.raises(UsageError) as refused:
        read_object(tmp_path / "manifest.json")
    assert str(tmp_path / "second") in refused.value.fix
