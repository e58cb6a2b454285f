"""Logs as people paste them: without headers, from several versions, behind progress bars. The
lines are written for these tests."""

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.logs.reading import read_logs, read_texts


def diagnosed(tmp_path, text):
    log = tmp_path / "job.log"
    log.write_text(text)
    return apply("log", read_logs([log]))


def told(tmp_path, text):
    return [(f.id, f.severity, f.rank) for f in diagnosed(tmp_path, text)]


def timeout(rank, number, operation="ALLREDUCE", values=4096, group=None):
    line = (
        f"[rank{rank}]:[E714 10:00:00.5 ProcessGroupNCCL.cpp:690] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={values}, NumelOut={values}, "
        "Timeout(ms)=600000) ran for 600011 milliseconds before timing out.\n"
    )
    if group is not None:
        line += progress(
            rank, number, number - 1, group, f"at work sequence id: {number} PG status: last"
        )
    return line


def progress(rank, enqueued, completed, group=0, before="Last"):
    return (
        f"[rank{rank}]:[E714 10:00:01.5 ProcessGroupNCCL.cpp:1890] [PG ID {group} PG GUID {group} Rank {rank}] "
        f"{before} enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
    )


DUMP = "Received a dump signal due to a collective timeout from rank 1 and we will dump the debug info. Last"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: Attempting to unscale FP16 gradients.\n", [("A05", "error", None)]),
        (
            '  File "/home/ann/train.py", line 9, in main\n    model = DDP(model)\n'
            "RuntimeError: Default process group has not been initialized, please make sure to call "
            "init_process_group.\n",
            [("L06", "error", None)],
        ),
        (
            "2026-07-14 10:00:00 [rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n",
            [("H11", "error", 3)],
        ),
        (
            "Epoch 0:  95%|##### | 95/100 [00:30<00:01, 3.1it/s]" + timeout(1, 400),
            [("H10", "suspect", None)],
        ),
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error "
            "[10.0.0.2]:25266: Connection reset by peer\n",
            [("H11", "suspect", None)],
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version "
            "2.28.9\nncclSystemError: System call (e.g. socket, malloc) or external library call failed.\n",
            [("H11", "error", None)],
        ),
        ("RuntimeError: CUDA error: invalid device ordinal\n", [("L03", "error", None)]),
        (  # torch prints its note right behind the exception
            "[rank0]: Traceback (most recent call last):\n"
            '[rank0]:   File "/u/train.py", line 18, in main\n'
            "[rank0]:     model = DDP(net)\n"
            "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93\n"
            "[rank0]: Last error:\n"
            "[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60\n"
            "[rank0]:[W1116 20:16:08.195572577 ProcessGroupNCCL.cpp:1575] Warning: WARNING: "
            "destroy_process_group() was not called before program exit, which can leak resources.\n",
            [("L03", "error", None)],
        ),
        ("ValueError: bad row, skipping\n" + "step\n" * 9, []),  # printed, and the script went on
    ],
)
def test_pasted_messages(tmp_path, text, expected):
    assert told(tmp_path, text) == expected


def test_a_system_error_of_nccl_is_the_network_or_the_driver(tmp_path):
    (finding,) = diagnosed(tmp_path, "[rank0]: ncclSystemError: System call failed.\n")
    assert "the network, the driver, or the machine" in finding.why


def test_a_dump_signal_alone(tmp_path):
    """torch 2.9 and later: the group that dumps its state need not be the one that timed out."""
    text = progress(0, 812, 812, before=DUMP) + progress(1, 812, 812, before=DUMP)
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.severity, finding.rank) == ("H10", "suspect", None)
    assert "belongs to another group" in finding.why


def test_a_dump_signal_shows_who_is_behind(tmp_path):
    text = timeout(0, 808, group=0) + timeout(2, 808, group=0) + progress(1, 807, 807, before=DUMP)
    assert told(tmp_path, text) == [("H10", "error", 1)]


@pytest.mark.parametrize(("number", "group"), [(32_000, 0), (5, 7)])
def test_other_numbers_and_other_groups_are_other_collectives(tmp_path, number, group):
    """Collective 5 of the default group, and 32,000 there, or 5 of another group."""
    text = timeout(0, 5, "BROADCAST", 1, group=0) + timeout(1, number, "ALLREDUCE", 4096, group)
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.rank) == ("H10", None)
    assert "Ranks 0 and 1 waited" not in finding.why


def test_the_same_number_with_another_size(tmp_path):
    text = timeout(0, 5, values=4096, group=0) + timeout(1, 5, values=1024, group=0)
    assert told(tmp_path, text) == [("H06", "error", None)]


def test_a_timeout_is_never_explained_by_a_short_timeout(tmp_path):
    """A rank that never arrives is no reason to raise the timeout (H13)."""
    found = diagnosed(tmp_path, timeout(1, 1, values=1, group=0) + timeout(2, 1, values=1, group=0))
    assert [finding.id for finding in found] == ["H10"]


def test_nobody_is_called_rank_none(tmp_path):
    exits = "E0714 10:00:00.1 4711 torch/distributed/elastic/multiprocessing/api.py:984] failed "
    exits += "(exitcode: 1) local_rank: 0 (pid: 4712) of binary: python\n"
    for text in (exits, "RuntimeError: Connection closed by peer [127.0.0.1]:7555 (gloo)\n"):
        for finding in diagnosed(tmp_path, text):
            assert "None" not in finding.why


def test_texts_of_ranks_are_read_like_logs():
    traceback = (
        'Traceback (most recent call last):\n  File "/home/ann/train.py", line 3, in <module>\n'
    )
    found = apply("log", read_texts({1: f"{traceback}KeyError: 'x'\n"}))
    assert [(f.id, f.line, f.evidence[-1]) for f in found] == [
        ("H11", 3, "rank 1:3: KeyError: 'x'")
    ]
