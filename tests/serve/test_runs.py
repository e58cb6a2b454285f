"""The list of runs: numbers from result.json or the last events, and a reason for a bad folder."""

import errno
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paralab.analyse.result import result_of
from paralab.serve import pages, runs
from paralab.serve.runs import Listing
from tests.conftest import DEADLINE_SECONDS, wait_until
from tests.serve.conftest import RUNS


def rows_of(root):
    return {row.name: row for row in Listing(root).read()}


def test_rows_without_result_json_match_the_analysis(served):
    rows = rows_of(served)
    assert set(rows) == {"ddp", "raised", "low_precision"}
    for name, status in (("ddp", "completed"), ("raised", "failed")):
        row, result = rows[name], result_of(served / name)
        assert (row.kind, row.status) == ("run", status)
        assert row.loss == pytest.approx(result.losses[-1])
        assert row.step == result.reached_step
    assert rows["ddp"].configuration == "ddp ×2 · accumulate 2 · bucket 25 MB"
    comparison = rows["low_precision"]
    assert (comparison.kind, comparison.status) == ("compare", "completed")
    assert comparison.configuration == "2 configurations"


def test_rows_with_result_json_show_it(served):
    result = result_of(served / "ddp").to_dict() | {"losses": [3.0, 2.0, None]}
    (served / "ddp" / "result.json").write_text(json.dumps(result))
    row = rows_of(served)["ddp"]
    assert row.loss == 2.0  # the last one that is finite
    assert row.step_seconds == result["step_seconds"]["median"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is damaged"),
        ('{"schema": 2, "plan"', "is damaged"),
        ('{"schema": 99}', "schema version 99"),
        ('{"schema": 2}', "cannot be read"),
        ("[]", "not contain a JSON object"),
        (None, "no manifest.json"),
    ],
)
def test_a_damaged_folder_is_a_row_with_the_reason(served, content, words):
    path = served / "ddp" / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    row = rows_of(served)["ddp"]
    assert row.status == "damaged"
    assert words in row.reason
    assert rows_of(served)["raised"].status == "failed"  # the others are not affected


def test_truncated_events_are_not_damage(served):
    path = served / "ddp" / "events" / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-400])
    row = rows_of(served)["ddp"]
    assert row.status in ("running", "killed")  # the file is new, so it may still grow
    assert row.step < 6


def test_the_last_lines_of_a_long_file_are_enough(served, monkeypatch):
    """Only the start event and the last steps of an event file are read."""
    path = served / "ddp" / "events" / "rank0.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + b'{"event":"other"}\n' * 20_000 + rest)
    expected = rows_of(served)["ddp"]
    assert expected.loss == pytest.approx(result_of(served / "ddp").losses[-1])
    monkeypatch.setattr(runs, "LAST_BYTES", 10)
    assert rows_of(served)["ddp"].status != "completed"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"ab\ncd\n", [b"ab", b"cd"]),
        (b"ab\ncd", [b"ab"]),  # the last line is not complete
        (b"ab\ncd\nefghij\nkl\nmn\n", [b"ab", b"kl", b"mn"]),  # ab|cd|efg…h|ij|kl|mn
        (b"", []),
    ],
)
def test_only_complete_lines_at_both_ends_are_read(tmp_path, monkeypatch, content, expected):
    """The pieces of two lines around the gap never become one line."""
    monkeypatch.setattr(runs, "FIRST_BYTES", 5)
    monkeypatch.setattr(runs, "LAST_BYTES", 9)
    (tmp_path / "file").write_bytes(content)
    assert runs._lines(tmp_path / "file") == expected


def test_the_newest_run_is_first_and_the_runs_of_a_comparison_are_inside_it(served):
    for name, created in (("ddp", "2026-03-01T10:00:00"), ("raised", "2026-03-02T10:00:00")):
        path = served / name / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"created": created}))
    names = [row.name for row in Listing(served).read()]
    assert names.index("raised") < names.index("ddp")
    inside = Listing(served, served / "low_precision").read()
    assert len(inside) == 6
    assert all(row.name.startswith("low_precision/0") for row in inside)


def test_the_rounds_of_an_experiment_that_have_not_begun_are_not_started(served):
    run = served / "low_precision" / "00_single" / "round3"
    (run / "events" / "rank0.jsonl").unlink()
    (run / "manifest.json").touch()
    rows = {row.name: row.status for row in Listing(served, served / "low_precision").read()}
    assert rows["low_precision/00_single/round3"] == "not started"
    assert list(rows.values()).count("completed") == 5


def test_a_run_served_by_itself_is_named_dot(served):
    assert [row.name for row in Listing(served / "ddp").read()] == ["."]


def test_an_experiment_without_an_outcome_is_not_finished(served):
    (served / "low_precision" / "outcome.json").unlink()
    assert rows_of(served)["low_precision"].status in ("running", "killed")
    old = time.time() - 3600
    for path in served.rglob("*"):
        os.utime(path, (old, old))
    assert rows_of(served)["low_precision"].status == "killed"


def test_finished_rows_are_read_once(served, monkeypatch):
    listing = Listing(served)
    first = listing.read()
    monkeypatch.setattr(runs, "read_row", lambda *_: pytest.fail("read again"))
    assert listing.read() == first


def test_a_new_folder_appears_and_an_edited_one_is_read_again(served):
    listing = Listing(served)
    listing.read()
    shutil.copytree(RUNS / "single", served / "new" / "nested")
    (served / "ddp" / "manifest.json").write_text("{")
    rows = {row.name: row.status for row in listing.read()}
    assert rows["new/nested"] == "completed"
    assert rows["ddp"] == "damaged"


class CountingLock:
    def __init__(self):
        self.lock, self.arrived = threading.Lock(), 0

    def __enter__(self):
        self.arrived += 1
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_viewers_who_wait_at_the_same_time_share_one_read(served, monkeypatch):
    """Each of 60 open lists once read the folder every second, and Ctrl-C waited for all of
    them."""
    listing, goes_on, reads = Listing(served), threading.Event(), []
    listing._lock, read = CountingLock(), listing._read

    def read_slowly():
        reads.append(read())
        goes_on.wait(DEADLINE_SECONDS)
        return reads[-1]

    monkeypatch.setattr(listing, "_read", read_slowly)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(listing.read)
        wait_until(lambda: reads)
        shutil.rmtree(served / "ddp")  # after the first read, so only the others miss it
        others = [pool.submit(listing.read) for _ in range(8)]
        wait_until(lambda: listing._lock.arrived == 9)
        goes_on.set()
        assert len(first.result()) == 3
        assert [len(other.result()) for other in others] == [2] * 8
    assert len(reads) == 2


def test_a_name_that_is_not_utf_8_is_a_row_with_the_reason(served):
    """A URL cannot contain such a name, so the whole list once failed."""
    (served / "ddp").rename(os.fsdecode(os.fsencode(served) + b"/\xff"))
    assert rows_of(served)["\\xff"].status == "damaged"
    assert "UTF-8" in rows_of(served)["\\xff"].reason
    assert "\\xff" in dict(pages.list_parts(Listing(served).read())["rows"])


def test_events_that_cannot_be_read_are_not_missing(served, monkeypatch):
    """A run whose events belong to another user was once shown as `starting`. Root may read any
    folder."""

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(runs.Path, "iterdir", refuse)
    row = rows_of(served)["ddp"]
    assert row.status == "damaged"
    assert "Permission denied" in row.reason


def test_links_and_hidden_folders_are_not_listed(served, tmp_path):
    (served / ".hidden").mkdir()
    shutil.copytree(RUNS / "single", served / ".hidden" / "run")
    shutil.copytree(RUNS / "single", tmp_path / "outside")
    (served / "out").symlink_to(tmp_path / "outside")
    assert set(rows_of(served)) == {"ddp", "raised", "low_precision"}
