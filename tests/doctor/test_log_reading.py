"""Read logs of any form: what must be harmless, and what the doctor must understand."""

import gzip
import io
import pickle
import random
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.logs.line import clean, parse
from paralab.doctor.logs.reading import rank_of, read_logs
from paralab.errors import UsageError

LOGS = Path(__file__).parent / "logs"
CRASH = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ann/runs/train.py", line 12, in <module>
[rank1]:     table[key]
[rank1]: KeyError: 'x'
"""
LOST = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ann/runs/train.py", line 30, in <module>
[rank0]:     dist.barrier()
[rank0]:   File "/opt/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356, in barrier
[rank0]:     work.wait()
[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7555.
"""


def ids_in(*paths):
    return [(f.id, f.rank, f.line) for f in apply("log", read_logs(paths))]


def written(folder, content, name="job.log"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("text", "rank", "rest"),
    [
        ("[rank1]: KeyError: 'a'", 1, "KeyError: 'a'"),
        ("[default3]:[rank3]: KeyError: 'a'", 3, "KeyError: 'a'"),
        ("[default0]:step 4", 0, "step 4"),
        ("W1115 12:00:00.123000 4711 torch/distributed/run.py:874] hello", None, "hello"),
        (
            "[rank2]:[E1115 12:00:00.123456789 ProcessGroupNCCL.cpp:629] [Rank 2] x",
            2,
            "[Rank 2] x",
        ),
        (
            "[rank5]:[E1115 12:00:00.1 P.cpp:6] [PG ID 1 PG GUID 3(mesh_dp) Rank 0] x",
            5,
            "[PG ID 1 PG GUID 3(mesh_dp) Rank 0] x",
        ),
        (
            "gpu07:4711:4802 [1] NCCL WARN broken",
            None,
            "gpu07:4711:4802 [1] NCCL WARN broken",
        ),
        ("[gpu0]: 71 C", None, "[gpu0]: 71 C"),
    ],
)
def test_what_stands_before_a_line(text, rank, rest):
    line = parse("job.log", 1, text, None, labeled=False)
    assert (line.rank, line.text) == (rank, rest)


def test_stamps_lie_on_one_clock():
    stamps = [
        "W1115 12:00:01.500000 1 a.py:1] x",
        "[W1115 12:00:01.500000000 a.cpp:1] x",
        "2026-11-15 12:00:01,500 INFO x",
    ]
    assert len({parse("f", 1, text, None, False).time for text in stamps}) == 1


def test_colours_and_progress_bars_go():
    assert clean(b"\x1b[1;31mKeyError\x1b[0m: 'x'") == "KeyError: 'x'"
    assert clean(b" 10%|#   | 1/10\r 90%|### | 9/10\r") == " 90%|### | 9/10"
    assert clean(b"\xff\xfeK\0e\0y\0") == "Key"
    assert clean(b"loss \xe9\xff 3") == "loss \ufffd\ufffd 3"


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("logs/ab12_x/attempt_0/1/stderr.log", 1),
        ("rank3.err", 3),
        ("out/rank_12.log", 12),
        ("/tmp/nccl_trace_rank_4", 4),
        ("job.err.2", 2),
        ("slurm-81723.out", None),
        ("rank1/job.log", None),
        ("frank2d.log", None),
        ("train.log", None),
    ],
)
def test_the_rank_in_a_name(name, rank):
    assert rank_of(name) == rank


def test_junk_does_not_hurt(tmp_path):
    noise = random.Random(0).randbytes(300_000)
    for content in (
        b"",
        b"\0" * 5000,
        noise,
        b"\n" * 1000,
        b"\r" * 100_000,
        "é".encode("latin-1") * 900,
        b"Traceback (most recent call last):",
    ):
        assert ids_in(written(tmp_path, content)) == []
    assert ids_in(written(tmp_path, noise + b"\n" + CRASH.encode())) == [("H11", 1, 12)]


def test_a_torn_last_line_and_windows_text(tmp_path):
    assert ids_in(written(tmp_path, CRASH[:-1])) == [("H11", 1, 12)]
    assert ids_in(written(tmp_path, CRASH.replace("\n", "\r\n"))) == [("H11", 1, 12)]
    assert ids_in(written(tmp_path, CRASH.encode("utf-16"))) == [("H11", 1, 12)]
    coloured = CRASH.replace("KeyError", "\x1b[1;35mKeyError\x1b[0m").replace(
        '"/home', '\x1b[35m"/home'
    )
    assert ids_in(written(tmp_path, coloured)) == [("H11", 1, 12)]
    assert ids_in(written(tmp_path, " 50%|##   | 3/6 [00:00<00:00]" + CRASH)) == [("H11", 1, 12)]


def test_ranks_whose_lines_lie_between_each_other(tmp_path):
    both = [
        line for pair in zip(CRASH.splitlines(), LOST.splitlines(), strict=False) for line in pair
    ] + LOST.splitlines()[4:]
    assert ids_in(written(tmp_path, "\n".join(both) + "\n")) == [("H11", 1, 12)]


def test_ranks_without_names_between_each_other(tmp_path):
    """Before init_process_group, no line has a rank. The two tracebacks cannot be separated, but
    they are the same."""
    lines = (LOGS / "L06_before_init.log").read_text().splitlines()
    mixed = [line for pair in zip(lines[:10], lines[10:20], strict=True) for line in pair] + lines[
        20:
    ]
    assert [(id, line) for id, _, line in ids_in(written(tmp_path, "\n".join(mixed)))] == [
        ("L06", 5)
    ]


def test_a_file_per_rank(tmp_path):
    bare = CRASH.replace("[rank1]: ", "")
    files = [written(tmp_path, LOST, "rank0.err"), written(tmp_path, bare, "rank1.err")]
    assert ids_in(*files) == ids_in(*reversed(files)) == [("H11", 1, 12)]


def test_the_first_of_two_own_errors_is_the_cause(tmp_path):
    """Timestamps decide between files: rank 0 failed a minute before rank 1."""
    early = "2026-11-15 12:00:00,000 INFO step 1\n" + CRASH.replace("rank1", "rank0").replace(
        "KeyError", "ValueError"
    )
    late = "2026-11-15 12:01:00,000 INFO step 1\n" + CRASH
    files = [written(tmp_path, late, "b.err"), written(tmp_path, early, "a.err")]
    assert ids_in(*files) == [("H11", 0, 12)]


def test_an_exception_that_was_caught_is_none(tmp_path):
    caught = (
        "2026-11-15 12:00:00,000 ERROR cache: no index\n"
        + CRASH.replace("[rank1]: ", "")
        + "2026-11-15 12:00:01,000 INFO step 1\n"
    )
    assert ids_in(written(tmp_path, caught)) == []
    printed = CRASH.replace("[rank1]: ", "") + "".join(f"step {n}\n" for n in range(20))
    assert ids_in(written(tmp_path, printed)) == []


def test_standard_input_and_compressed_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CRASH.encode())))
    found = apply("log", read_logs(["-"]))
    assert [(f.id, f.rank) for f in found] == [("H11", 1)]
    assert found[0].evidence[-1] == "stdin:4: KeyError: 'x'"
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress(CRASH.encode()))
    assert ids_in(packed) == [("H11", 1, 12)]


def test_wrong_use_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"There is no log .*nowhere\.log"):
        read_logs([tmp_path / "nowhere.log"])
    with pytest.raises(UsageError, match="contains no logs"):
        read_logs([tmp_path])


def test_a_long_log_is_read_in_pieces(tmp_path, monkeypatch):
    """Read 20 MB. A log of 100 MB takes the same memory and five times as long."""
    monkeypatch.setattr(
        "paralab.doctor.logs.reading.FULLY", 200
    )  # tracemalloc makes every line slow
    line = b"2026-11-15 12:00:00,000 INFO train: rank 0 step 12 loss 0.1234 samples/s 3121\n"
    path = written(tmp_path, line * (20_000_000 // len(line)) + CRASH.encode() + LOST.encode())
    tracemalloc.start()
    start = time.process_time()
    logs = read_logs([path])
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(f.id, f.rank, f.line) for f in apply("log", logs)] == [("H11", 1, 12)]
    assert logs.tracebacks[0].first.number == 20_000_000 // len(line) + 1
    assert peak < 16e6
    assert seconds < 10  # CPU time, with tracemalloc's overhead


def test_a_warning_in_every_line_is_kept_a_few_times(tmp_path):
    path = written(
        tmp_path, "train.py:3: UserWarning: Connection reset by peer, trying again\n" * 60_000
    )
    logs = read_logs([path])
    assert len(logs.lines) < 1000
    assert apply("log", logs) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H01", [("H01", 1, 22)]),
        ("H03", [("H03", None, None)]),  # JSON has no frames; with two ranks, either may be wrong
        ("H04", [("H04", None, 7)]),
        ("H05", [("H05", None, 7)]),
        ("healthy", []),
    ],
)
def test_flight_recorder_dumps(name, expected):
    assert ids_in(LOGS / "dumps" / name) == expected


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    path = written(tmp_path, pickle.dumps({"entries": [Trap()]}), "nccl_trace_rank_0")
    with pytest.raises(UsageError, match=r"builtins\.exec"):
        read_logs([path])
    assert (
        ids_in(written(tmp_path, pickle.dumps({"entries": []})[:-5], "nccl_trace_rank_1")) == []
    )  # torn off


def test_an_exception_that_torch_logs_is_none(tmp_path):
    """torch's loggers begin each line with the rank and a timestamp. An interpreter that dies
    writes only the rank."""
    lines = CRASH.replace("[rank1]: ", "").splitlines()
    logged = [
        f"[rank1]:E1115 12:00:00.000000 4711 torch/_dynamo/utils.py:12] {line}" for line in lines
    ]
    assert ids_in(written(tmp_path, "\n".join(logged) + "\nstep 1\n" * 9)) == []
