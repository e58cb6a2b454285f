"""Streams send what changed, keep quiet connections open, and end with the run."""

import json

import anyio
import pytest

from paralab.errors import UsageError
from paralab.serve import streams
from paralab.serve.streams import stream


@pytest.fixture
def sleeps(monkeypatch):
    """Do not wait, and note the requested times."""
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(streams.anyio, "sleep", sleep)
    return waited


def events_of(read, most=1000):
    """Return (event, data) pairs; `:` for a heartbeat."""

    async def collect():
        calls = 0

        def is_stopping():
            nonlocal calls
            calls += 1
            return calls > most

        return [text async for text in stream(read, is_stopping)]

    first, *rest = anyio.run(collect)
    assert first == "retry: 1000\n\n"
    found = []
    for text in rest:
        lines = dict(line.split(": ", 1) for line in text.strip().splitlines())
        kind = lines.get("event", ":")
        found.append((kind, json.loads(lines["data"]) if kind != ":" else None))
    return found


def test_only_changed_parts_are_sent_and_the_end_ends_the_stream(sleeps):
    states = [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 2}]
    left = iter(states)

    def read():
        state = next(left)
        return state, state is states[-1]

    assert events_of(read) == [
        ("parts", {"a": 1, "b": 1}),
        ("parts", {"b": 2}),
        ("parts", {"a": 3}),
        ("over", {}),
    ]
    assert sleeps == [0.25] * 3  # so at most four events in a second


def test_a_quiet_stream_has_a_heartbeat_every_ten_seconds(sleeps):
    found = events_of(lambda: ({"a": 1}, False), most=100)
    assert [kind for kind, _ in found] == ["parts", ":", ":"]
    assert sum(sleeps) == 25


def test_a_problem_is_told_and_ends_the_stream(sleeps):
    def read():
        raise UsageError("The folder is gone.", fix="another one")

    assert events_of(read) == [("problem", {"text": "The folder is gone.\nTry: another one"})]


def test_text_with_line_breaks_stays_one_event(sleeps):
    assert events_of(lambda: ({"a": "x\n\ndata: y"}, True))[0] == ("parts", {"a": "x\n\ndata: y"})


def test_a_stopped_server_ends_its_streams(sleeps):
    assert events_of(lambda: ({"a": 1}, False), most=0) == []
