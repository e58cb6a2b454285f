"""Who hung: laid-out testimonies of two ranks, and the rank that must be named."""

import json

import pytest

from paralab.analyse.hang import who_hung


def frame(file, line, function, code=""):
    return {"file": file, "line": line, "function": function, "code": code}


OURS = [
    frame("/x/paralab/worker/__main__.py", 50, "main"),
    frame("/x/paralab/worker/passes.py", 30, "accumulate", "backward(loss)"),
]
IN_BACKWARD = [*OURS, frame("/x/site-packages/torch/autograd/graph.py", 800, "_engine_run_backward")]
IN_BARRIER = [*OURS, frame("/x/site-packages/torch/distributed/distributed_c10d.py", 900, "wait")]
IN_THEIR_CODE = [*OURS, frame("/home/me/train.py", 12, "forward", "time.sleep(1000)")]


def entry(number, retired, name="gloo:all_reduce"):
    return {
        "process_group": ["1", "undefined"],
        "collective_seq_id": number,
        "profiling_name": name,
        "retired": retired,
        "state": "scheduled",
        "input_sizes": [[100, 10]],
    }


def spoken(folder, rank, stack, arrived, waiting, state="S"):
    (folder / f"rank{rank}.state").write_text(json.dumps({"state": state, "pid": 1}))
    if stack is not None:
        entries = [entry(number, retired=not (waiting and number == arrived)) for number in range(1, arrived + 1)]
        (folder / f"rank{rank}.json").write_text(json.dumps({"stacks": {"MainThread": stack}, "collectives": entries}))


CASES = {
    #                     rank 0: stack, collectives, waits  rank 1                         named  words
    "one does not arrive": ((IN_BACKWARD, 7, True, "S"), (IN_THEIR_CODE, 6, False, "S"), 1, "did not arrive"),
    "the other one": ((IN_THEIR_CODE, 6, False, "R"), (IN_BACKWARD, 7, True, "S"), 0, "did not arrive"),
    "one is stopped": ((IN_BACKWARD, 7, True, "S"), (None, 0, False, "T"), 1, "is stopped"),
    "one holds the interpreter": ((IN_BACKWARD, 7, True, "S"), (None, 0, False, "R"), 1, "does not let go"),
    "all have arrived": ((IN_BACKWARD, 7, True, "S"), (IN_BARRIER, 7, True, "S"), 0, "nobody is missing"),
    "none waits": ((IN_THEIR_CODE, 3, False, "R"), (IN_THEIR_CODE, 3, False, "R"), 0, "did not come to the end"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_right_rank_is_named(tmp_path, case):
    first, second, named, words = CASES[case]
    for rank, (stack, arrived, waiting, state) in enumerate((first, second)):
        spoken(tmp_path, rank, stack, arrived, waiting, state)
    hang = who_hung(tmp_path, 2, late=[0, 1])
    assert (hang.rank, words in hang.why) == (named, True), hang


def test_the_line_is_the_users_and_the_others_wait_is_told(tmp_path):
    spoken(tmp_path, 0, IN_BACKWARD, 7, waiting=True)
    spoken(tmp_path, 1, IN_THEIR_CODE, 6, waiting=False)
    hang = who_hung(tmp_path, 2, late=[0, 1])
    assert hang.where == "/home/me/train.py:12 in forward: time.sleep(1000)"
    assert (
        hang.waiting
        == "rank 0 waits in all_reduce of 1,000 values, at /x/paralab/worker/passes.py:30 in accumulate: backward(loss)"
    )


def test_a_silent_rank_is_where_the_fault_handler_saw_it(tmp_path):
    spoken(tmp_path, 0, IN_BACKWARD, 7, waiting=True)
    spoken(tmp_path, 1, None, 0, waiting=False, state="R")
    (tmp_path / "rank1.txt").write_text(
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/lib/python3.11/threading.py", line 2 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/home/me/train.py", line 9 in spin\n'
        '  File "/x/paralab/worker/passes.py", line 30 in accumulate\n'
    )
    assert who_hung(tmp_path, 2, late=[0, 1]).where == 'File "/home/me/train.py", line 9 in spin'
