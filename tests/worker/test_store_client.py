"""Requests to and answers from the store client, without its process."""

import pytest

from paralab.worker.processes.store_client import StoreClient, answer


@pytest.fixture
def client():
    client = StoreClient()
    client.open("127.0.0.1", 0, "test", serve=True)
    return client


def ask(client, do, **arguments):
    return answer(client, {"id": 7, "do": do, **arguments})


def test_notes_are_json(client):
    assert ask(client, "has", name="work") == {"id": 7, "value": False}
    assert ask(client, "put", name="work", note={"code": 0, "jobs": [1.5, None]})["value"] is None
    assert ask(client, "has", name="work")["value"] is True
    assert ask(client, "get", name="work", seconds=1)["value"] == [{"code": 0, "jobs": [1.5, None]}]


def test_a_note_that_does_not_come_is_empty_and_not_lost(client):
    assert ask(client, "get", name="never", seconds=0.01) == {"id": 7, "value": []}


def test_two_clients_share_notes_under_the_same_prefix(client):
    first, other, elsewhere = StoreClient(), StoreClient(), StoreClient()
    port = first.open("127.0.0.1", 0, "job", serve=True)
    other.open("127.0.0.1", port, "job", serve=False)
    elsewhere.open("127.0.0.1", port, "another job", serve=False)
    first.put("failed", True)
    assert (other.has("failed"), elsewhere.has("failed")) == (True, False)


def test_a_store_that_is_gone_is_lost(client):
    server, other = StoreClient(), StoreClient()
    port = server.open("127.0.0.1", 0, "job", serve=True)
    other.open("127.0.0.1", port, "job", serve=False)
    server._store = None
    assert "lost" in ask(other, "has", name="failed")
    assert "lost" in ask(other, "get", name="failed", seconds=0.01)
    assert ask(other, "put", name="failed", note=True) == {"id": 7, "value": None}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["A", "B"]), ("1", ["B"]), ("1,0", ["B", "A"]), ("GPU-x,0", ["? GPU-x", "A"])],
)
def test_gpus_are_named_by_their_identifiers(monkeypatch, visible, expected):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(expected))
    monkeypatch.setattr("torch.cuda._raw_device_uuid_nvml", lambda: ["A", "B"])
    monkeypatch.setattr("paralab.worker.processes.store_client.host_mark", lambda: "?")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert StoreClient().gpus() == expected


def test_without_cuda_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    assert StoreClient().gpus() == []
