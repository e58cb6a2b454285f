"""Logs as people paste them: without headers, from several versions, after progress bars. We wrote
these lines for the tests."""

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.logs.reading import read_logs, read_texts


def diagnosed(tmp_path, text):
    log = tmp_path / "job.log"
    log.write_text(text)
    return apply("log", read_logs([log]))


def ids_in(tmp_path, text):
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

FIRST_COLLECTIVE = (
    "[rank3]: torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId "
    "from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout\n"
)
IN_BARRIER = (
    '[rank2]:   File "/opt/lib/python3.12/site-packages/recipes/tune.py", line 74, in save\n'
    "[rank2]:     torch.distributed.barrier()\n"
    '[rank2]:   File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 5, in barrier\n'
    "[rank2]:     work.wait()\n"
)


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
        (  # torch prints its note right after the exception
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
        (  # only the message, without the exception's name
            "`Expected to mark a variable ready only once. Parameter at index 7 has been marked as ready twice.`\n",
            [("S02", "suspect", None)],
        ),
        (  # several ranks' output on one line, so no exception is at its start
            "^ ^torch^.DistBackendError^: ^ NCCL error\nLast error:\n"
            "Duplicate GPU detected : rank 0 and rank 3 both on CUDA device 60^\n",
            [("L03", "error", None)],
        ),
        (
            "RuntimeError: cuda runtime error (101) : invalid device ordinal\n",
            [("L03", "error", None)],
        ),
        (
            "RuntimeError: connect() timed out. Original timeout was 9 ms.\n",
            [("H18", "error", None)],
        ),
        (
            "The client socket has timed out after 9s while trying to connect to 10.0.0.1:29500\n",
            [("H18", "error", None)],
        ),
        (
            "AssertionError: No inf checks were recorded prior to update.\n",
            [("A04", "error", None)],
        ),
        (
            "AssertionError: No inf checks were recorded for this optimizer.\n",
            [("H11", "error", None)],
        ),
        ("RuntimeError: CUDA error: out of memory\n", [("H11", "error", None)]),
        (FIRST_COLLECTIVE, [("H18", "suspect", None)]),  # rank 0 is missing, for an unknown reason
        (
            FIRST_COLLECTIVE + "Sending process 12 closing signal SIGTERM\n",
            [("H13", "suspect", None)],
        ),
    ],
)
def test_pasted_messages(tmp_path, text, expected):
    assert ids_in(tmp_path, text) == expected


def test_a_system_error_of_nccl_is_the_network_or_the_driver(tmp_path):
    (finding,) = diagnosed(tmp_path, "[rank0]: ncclSystemError: System call failed.\n")
    assert "the network, the driver, or the machine" in finding.why


def test_a_dump_signal_alone(tmp_path):
    """From torch 2.9 on, the group that dumps its state may not be the one that timed out."""
    text = progress(0, 812, 812, before=DUMP) + progress(1, 812, 812, before=DUMP)
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.severity, finding.rank) == ("H10", "suspect", None)
    assert "belongs to another group" in finding.why


def test_a_dump_signal_shows_who_is_behind(tmp_path):
    text = timeout(0, 808, group=0) + timeout(2, 808, group=0) + progress(1, 807, 807, before=DUMP)
    assert ids_in(tmp_path, text) == [("H10", "error", 1)]


@pytest.mark.parametrize(("number", "group"), [(32_000, 0), (5, 7)])
def test_other_numbers_and_other_groups_are_other_collectives(tmp_path, number, group):
    """Compare collective 5 of the default group with 32,000 there, and with 5 of another group."""
    text = timeout(0, 5, "BROADCAST", 1, group=0) + timeout(1, number, "ALLREDUCE", 4096, group)
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.rank) == ("H10", None)
    assert "Ranks 0 and 1 waited" not in finding.why


def test_the_same_number_with_another_size(tmp_path):
    text = timeout(0, 5, values=4096, group=0) + timeout(1, 5, values=1024, group=0)
    assert ids_in(tmp_path, text) == [("H06", "error", None)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("all_reduce(SUM) of float32 [3], but rank 0 calls all_reduce(SUM) of float32 [5].", "H06"),
        (
            "broadcast with root 1 of int8 [3], but rank 0 calls broadcast with root 1 of int8 [5].",
            "H06",
        ),
        (
            "broadcast with root 1 of int8 [3], but rank 0 calls broadcast with root 0 of int8 [3].",
            "H04",
        ),
        ("all_reduce(SUM) of float32 [3], but rank 0 calls barrier.", "H04"),
        ("barrier, but rank 0 calls all_reduce(MAX) of float32 [3].", "H04"),
    ],
)
def test_different_calls_on_the_local_backend(message, expected, tmp_path):
    """The doctor once reported them as exceptions on all ranks (H11)."""
    error = "[rank1]: torch.distributed.DistBackendError: "
    frame = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 7, in <module>\n'
    text = f"{frame}{error}Ranks make different calls: call 4 of rank 1 is {message}\n"
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.severity) == (expected, "error")
    assert "collective 4" in finding.why
    text = f"{frame}{error}Sizes differ in alltoall (call 4): rank 0 sends 20 bytes to rank 1, which expects 16.\n"
    assert ids_in(tmp_path, text) == [("H06", "error", None)]


def test_two_ranks_that_receive_have_no_network_problem(tmp_path):
    text = "".join(
        f"[rank{rank}]: Traceback (most recent call last):\n"
        f'[rank{rank}]:   File "train.py", line 7, in <module>\n'
        f"[rank{rank}]:     dist.recv(tensor, src=1 - rank)\n"
        f"[rank{rank}]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "12000ms for recv operation to complete\n"
        for rank in (0, 1)
    )
    assert ids_in(tmp_path, text) == [("H04", "suspect", None)]


def test_a_timeout_is_never_explained_by_a_short_timeout(tmp_path):
    """Do not suggest a longer timeout (H13) for a rank that never arrives."""
    found = diagnosed(tmp_path, timeout(1, 1, values=1, group=0) + timeout(2, 1, values=1, group=0))
    assert [finding.id for finding in found] == ["H10"]


@pytest.mark.parametrize(
    "line",
    [
        "2026-07-14 10:00:01,000 WARNING board: address already in use, trying 6007",
        "CUDA error: out of memory, trying half the batch",
        "element 0 of tensors does not require grad, skipping",
        "Expected to mark a variable ready only once? no",
    ],
)
def test_known_words_in_a_job_that_went_on(tmp_path, line):
    steps = "".join(f"step {number} loss 0.1\n" for number in range(12))
    assert diagnosed(tmp_path, f"{line}\n{steps}") == []


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


@pytest.mark.parametrize(
    ("model", "keys", "expected"),
    [
        # Every name in a wrapper begins with "module.", so missing names alone prove nothing.
        ("DistributedDataParallel", 'Missing key(s) in state_dict: "module.head.bias".', "H11"),
        (
            "DataParallel",
            'Missing key(s) in state_dict: "module.a".\n\tsize mismatch for module.b',
            "H11",
        ),
        ("DataParallel", 'Unexpected key(s) in state_dict: "module.head.bias".', "H11"),
        ("DataParallel", 'Unexpected key(s) in state_dict: "head.weight", "head.bias".', "C01"),
        ("Net", 'Missing key(s): "a".\n\tUnexpected key(s) in state_dict: "module.a".', "C01"),
    ],
)
def test_names_of_a_checkpoint(tmp_path, model, keys, expected):
    text = f"RuntimeError: Error(s) in loading state_dict for {model}:\n\t{keys}\n"
    (finding,) = diagnosed(tmp_path, text)
    assert finding.id == expected
    assert expected == "C01" or "module." in finding.why  # more than "Error(s) in loading"


def test_a_victim_that_caught_its_exception(tmp_path):
    text = "rank 1: step failed: Application timeout caused pair closure\n"
    assert ids_in(tmp_path, text) == [("H11", "suspect", None)]
    assert ids_in(tmp_path, text + "step done\n" * 9) == []


def test_a_rank_that_waits_inside_a_library(tmp_path):
    """No frame is the user's, so the innermost one outside torch counts, and no rank is blamed."""
    text = (
        IN_BARRIER
        + "[rank2]: RuntimeError: [gloo/x.cc:81] Timed out waiting 9ms for recv operation to complete\n"
    )
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.severity, finding.rank, finding.line) == (
        "H03",
        "suspect",
        None,
        74,
    )


def test_a_log_that_ends_inside_a_traceback(tmp_path):
    (finding,) = diagnosed(tmp_path, IN_BARRIER)
    assert (finding.id, finding.severity, finding.line) == ("H11", "suspect", 74)
    assert diagnosed(tmp_path, IN_BARRIER + "[rank2]: step\n" * 9) == []  # a stack that it printed


def test_the_report_of_a_launcher_is_no_exception_of_its_own(tmp_path):
    """Older versions of spawn raise a bare Exception. It quotes a truncated log of the process,
    which therefore did arrive."""
    text = (
        "RuntimeError: Application timeout caused pair closure\n\nTraceback (most recent call last):\n"
        '  File "/home/ann/train.py", line 62, in <module>\n    launch(main)\n'
        '  File "/opt/lib/python3.7/site-packages/torch/multiprocessing/spawn.py", line 118, in join\n'
        "    raise Exception(msg)\nException: \n\n-- Process 3 terminated with the following error:\n"
        'Traceback (most recent call last):\n  File "/home/ann/train.py", line 31, in main\n    gather(x)\n'
    )
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.severity, finding.rank) == ("H11", "suspect", None)
    assert "victim" in finding.why


def test_a_timeout_without_its_group(tmp_path):
    """The excerpt lacks rank 2's line with the group's name, but has another rank's."""
    (finding,) = diagnosed(tmp_path, timeout(0, 5, group=3) + timeout(2, 5))
    assert "Ranks 0 and 2 waited" in finding.why
    assert "rank 1" in finding.why  # says nothing here


def test_dumps_name_the_rank_that_has_nothing_pending(tmp_path):
    observed = "[rank0]:[E714 10:00:00.1 ProcessGroupNCCL.cpp:1806] [PG ID 0 PG GUID 0 Rank 0] Observed flight recorder dump\n"
    text = progress(1, 22, 21, before=DUMP) + observed + progress(2, 22, 21, before=DUMP)
    (finding,) = diagnosed(tmp_path, text)
    assert "Ranks 1 and 2 did not finish collective 22. Rank 0" in finding.why


def test_an_editor_prints_the_innermost_frame_first(tmp_path):
    text = (
        '  File "/opt/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py", line 15, in broadcast\n'
        '    work = group.broadcast([tensor], opts)\n  File "/home/ann/tune.py", line 23, in main\n    share(x)\n'
        '  File "/home/ann/tune.py", line 36, in <module>\n    main(args)\nRuntimeError: bad shape\n'
    )
    assert [(f.id, f.line) for f in diagnosed(tmp_path, text)] == [("H11", 23)]
    header = "Traceback (most recent call last):\n"
    assert [(f.id, f.line) for f in diagnosed(tmp_path, header + text)] == [("H11", 36)]


def test_a_message_above_the_frames(tmp_path):
    """The log is upside down. A line of code is not an exception, and the cause is reported
    once."""
    text = (
        "Duplicate GPU detected : rank 9 and rank 1 both on CUDA device 34\n Last error:\n"
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, invalid usage\n"
        'File "/opt/lib/python3.10/site-packages/torch/distributed/c10d_logger.py", line 81, in wrapper\n'
        "torch.distributed.barrier()\n"
    )
    assert ids_in(tmp_path, text) == [("L03", "error", None)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("INFO step 9", "", ["H11"]),  # logged, and then the script died
        ("INFO step 9", "INFO done\n" * 9, []),
        ("ERROR cache: no index", "INFO step 9\n", []),  # logged, and the script continued
    ],
)
def test_a_traceback_after_a_logger_s_line(tmp_path, before, after, expected):
    stamp = "2026-07-14 10:00:00,000 "
    text = f"{stamp}{before}\nTraceback (most recent call last):\n"
    text += '  File "/home/ann/train.py", line 3, in <module>\n    x[1]\nIndexError: 1\n'
    text += "".join(f"{stamp}{line}\n" for line in after.splitlines())
    assert [finding.id for finding in diagnosed(tmp_path, text)] == expected


def test_a_lost_rendezvous(tmp_path):
    text = (
        "Traceback (most recent call last):\n"
        '  File "/opt/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 1, in _call_store\n'
        "    return getattr(self._store, store_op)(*args)\nRuntimeError: Connection reset by peer\n"
    )
    assert ids_in(tmp_path, text) == [("H18", "suspect", None)]


CRASH = """Traceback (most recent call last):
  File "/home/ann/train.py", line 12, in <module>
    table[key]
KeyError: 'x'
"""


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("[default3]:", 3),
        ("3: ", 3),
        ("[1,3]<stderr>:", 3),  # mpirun --tag-output
        ("gpu07: ", None),
        ("> ", None),
        ("2026-07-14T10:00:0{}.123Z stderr F ", None),  # a collector stamps every line
        ("(Worker pid={}1, ip=10.0.0.2) ", None),
    ],
)
def test_what_stands_before_every_line(tmp_path, prefix, rank):
    lines = (prefix.format(number) + line for number, line in enumerate(CRASH.splitlines()))
    (finding,) = diagnosed(tmp_path, "".join(f"{line}\n" for line in lines))
    assert (finding.id, finding.line, finding.rank) == ("H11", 12, rank)
    assert "`KeyError: 'x'`" in finding.why


def test_boxed_tracebacks(tmp_path):
    rich = (
        "╭── Traceback (most recent call last) ──╮\n│ /home/ann/train.py:12 in <module>      │\n"
        "│   11 def main():                      │\n│ ❱ 12 │   table[key]                     │\n"
        "╰───────────────────────────────────────╯\nKeyError: 'x'\n"
    )
    notebook = (
        "KeyError                                  Traceback (most recent call last)\nCell In[3], line 1\n"
        "----> 1 train()\n\nFile ~/train.py:12, in train()\n     11 def train():\n---> 12     table[key]\n\n"
        "KeyError: 'x'\n"
    )
    for text in (rich, notebook):
        (finding,) = diagnosed(tmp_path, text)
        assert (finding.id, finding.line) == ("H11", 12)
        assert "`table[key]`" in finding.why


@pytest.mark.parametrize(("content", "word"), [(b"", "empty"), (bytes(range(256)) * 99, "text")])
def test_a_note_about_what_is_no_log(tmp_path, content, word):
    log = tmp_path / "job.log"
    log.write_bytes(content)
    (note,) = read_logs([log]).notes
    assert word in note


@pytest.mark.parametrize(("code", "expected"), [(-9, "H12"), (-11, "H11")])
def test_a_local_rank_is_better_than_none(tmp_path, code, expected):
    """The end of the report, which would name the rank, is missing."""
    text = f"ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: {code}) local_rank: 3 (pid: 7)\n"
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.rank) == (expected, None)
    assert "local rank 3" in finding.why


def test_nccl_says_which_call_of_cuda_failed(tmp_path):
    text = (
        "[rank7]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\n"
        "[rank7]: Last error:\n[rank7]: Cuda failure 1 'invalid argument'\n"
    )
    (finding,) = diagnosed(tmp_path, text)
    assert (finding.id, finding.rank) == ("H11", 7)
    assert "invalid argument" in finding.why
