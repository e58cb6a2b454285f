"""The cause of a failure is the rank that failed, not the ranks that noticed."""

import json

import pytest

from paralab.analyse.failure import root_cause

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14255"


def folder(tmp_path, *ranks):
    (tmp_path / "events").mkdir()
    for rank, events in enumerate(ranks):
        (tmp_path / "events" / f"rank{rank}.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in events)
        )
    return tmp_path


def error(time, text):
    return {"event": "error", "time": time, "error": text, "detail": "their line"}


def step(number):
    times = {"start": number, "end": number + 1.0}
    return {"event": "step", "step": number, **times, "samples": 1, "loss": 1.0}


def test_the_victim_is_not_the_cause_even_if_it_speaks_first(tmp_path):
    where = folder(
        tmp_path,
        [step(0), error(1.0, PEER)],
        [step(0), step(1), error(2.0, "ValueError: bad label")],
    )
    cause = root_cause(where, [1, 1], where / "logs")
    assert (cause.rank, cause.what, cause.detail) == (1, "ValueError: bad label", "their line")


def test_of_two_own_errors_the_first_counts(tmp_path):
    where = folder(tmp_path, [error(2.0, "ValueError: second")], [error(1.0, "ValueError: first")])
    assert root_cause(where, [1, 1], where / "logs").what == "ValueError: first"


def test_a_rank_that_died_without_a_word(tmp_path):
    where = folder(tmp_path, [step(3), error(1.0, PEER)], [step(3)])
    cause = root_cause(where, [1, -9], where / "logs")
    assert (cause.rank, cause.what) == (1, "it was killed by SIGKILL")


def test_a_rank_that_left_early(tmp_path):
    where = folder(tmp_path, [error(1.0, PEER)], [])
    assert (
        root_cause(where, [1, 7], where / "logs").what == "it exited with code 7 without an error"
    )


def test_a_rank_that_the_launcher_ended_is_not_the_cause(tmp_path):
    where = folder(tmp_path, [{"event": "end", "time": 9.0, "status": "interrupted"}], [step(0)])
    cause = root_cause(where, [None, 7], where / "logs")
    assert (cause.rank, cause.what) == (1, "it exited with code 7 without an error")


def test_the_rank_that_the_others_waited_for(tmp_path):
    timeout = "RuntimeError: Timed out waiting 600000ms for recv operation to complete"
    where = folder(
        tmp_path,
        [step(0), error(1.0, timeout), {"event": "end", "time": 9.0, "status": "failed"}],
        [step(0)],
    )
    cause = root_cause(where, [1, None], where / "logs")
    assert cause.rank == 1
    assert "did not reach" in cause.what


def test_a_rank_that_left_with_code_0_is_a_failure(tmp_path):
    where = folder(
        tmp_path, [step(0)], [step(0), {"event": "end", "time": 9.0, "status": "completed"}]
    )
    assert (
        root_cause(where, [0, 0], where / "logs").what == "it exited with code 0 without an error"
    )


IN_TORCH = 'File "/x/torch/distributed/distributed_c10d.py", line 9, in all_reduce'
IN_DATA = 'File "/home/me/train.py", line 9, in download'


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("RuntimeError: Application timeout caused pair closure", IN_TORCH, 1),
        ("RuntimeError: Socket Timeout", IN_TORCH, 1),
        ("RuntimeError: wait timeout after 600000ms, keys: /default_pg/0//1", IN_TORCH, 1),
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 60s",
            IN_TORCH,
            1,
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            IN_TORCH,
            1,
        ),
        (
            "RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
            IN_TORCH,
            1,
        ),
        ("RuntimeError: Rank 1 failed to pass monitoredBarrier in 600000 ms", IN_TORCH, 1),
        (
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            IN_DATA,
            0,
        ),  # the user's own connection
    ],
)
def test_what_only_a_victim_says(tmp_path, text, where, cause):
    """Rank 1 died a second later, without a message."""
    first = error(1.0, text) | {"traceback": where}
    found = root_cause(folder(tmp_path, [step(0), first], [step(0)]), [1, -9], tmp_path / "logs")
    assert found.rank == cause


@pytest.mark.parametrize(
    "words",
    [
        PEER,
        "RuntimeError: [gloo/transport/tcp/pair.cc:588] Application timeout caused pair closure",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
        "DistBackendError: NCCL communicator was aborted on rank 0.",
        "DistStoreError: wait timeout after 300000ms, keys: /0//cpu//0/1",
    ],
)
def test_a_victim_is_never_the_cause(tmp_path, words):
    """gloo closes all connections of a rank whose wait timed out. "Application timeout" is a
    consequence."""
    where = folder(tmp_path, [error(1.0, words)], [error(2.0, "KeyError: 'label'")])
    assert root_cause(where, [1, 1], where / "logs").rank == 1
