"""Stack dumps of two ranks, and the rank that the analysis must blame."""

import json

import pytest

from paralab.analyse.hang import find_hang


def frame(file, line, function, code=""):
    return {"file": file, "line": line, "function": function, "code": code}


OURS = [
    frame("/x/paralab/machine/child.py", 37, "_run"),  # where ranks are not forked
    frame("/x/paralab/worker/__main__.py", 50, "main"),
    frame("/x/paralab/worker/passes.py", 30, "accumulate", "backward(loss)"),
]
IN_BACKWARD = [
    *OURS,
    frame("/x/site-packages/torch/autograd/graph.py", 800, "_engine_run_backward"),
]
IN_BARRIER = [*OURS, frame("/x/site-packages/torch/distributed/distributed_c10d.py", 900, "wait")]
IN_THEIR_CODE = [*OURS, frame("/home/me/train.py", 12, "forward", "time.sleep(1000)")]


def entry(number, retired, name="gloo:all_reduce", group="1", size=(100, 10)):
    return {
        "process_group": [group, "undefined"],
        "collective_seq_id": number,
        "profiling_name": name,
        "retired": retired,
        "state": "scheduled",
        "input_sizes": [list(size)],
    }


def spoken(folder, rank, stack, arrived, waiting, state="S"):
    (folder / f"rank{rank}.state").write_text(json.dumps({"state": state, "pid": 1}))
    if stack is not None:
        entries = [
            entry(number, retired=not (waiting and number == arrived))
            for number in range(1, arrived + 1)
        ]
        (folder / f"rank{rank}.json").write_text(
            json.dumps({"stacks": {"MainThread": stack}, "collectives": entries})
        )


CASES = {
    #                     rank 0: stack, collectives, waits  rank 1                         named
    #   kind
    "one does not arrive": (
        (IN_BACKWARD, 7, True, "S"),
        (IN_THEIR_CODE, 6, False, "S"),
        1,
        "behind",
    ),
    "the other one": (
        (IN_THEIR_CODE, 6, False, "R"),
        (IN_BACKWARD, 7, True, "S"),
        0,
        "behind",
    ),
    "one is stopped": ((IN_BACKWARD, 7, True, "S"), (None, 0, False, "T"), 1, "stopped"),
    "one holds the interpreter": (
        (IN_BACKWARD, 7, True, "S"),
        (None, 0, False, "R"),
        1,
        "blocked",
    ),
    "all have arrived": (
        (IN_BACKWARD, 7, True, "S"),
        (IN_BARRIER, 7, True, "S"),
        0,
        "network",
    ),
    "none waits": (
        (IN_THEIR_CODE, 3, False, "R"),
        (IN_THEIR_CODE, 3, False, "R"),
        0,
        "slow",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_right_rank_is_named(tmp_path, case):
    first, second, named, kind = CASES[case]
    for rank, (stack, arrived, waiting, state) in enumerate((first, second)):
        spoken(tmp_path, rank, stack, arrived, waiting, state)
    hang = find_hang(tmp_path, 2, late=[0, 1])
    assert (hang.rank, hang.kind) == (named, kind), hang


def test_the_line_is_the_users_and_the_others_wait_is_told(tmp_path):
    spoken(tmp_path, 0, IN_BACKWARD, 7, waiting=True)
    spoken(tmp_path, 1, IN_THEIR_CODE, 6, waiting=False)
    hang = find_hang(tmp_path, 2, late=[0, 1])
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
    assert find_hang(tmp_path, 2, late=[0, 1]).where == 'File "/home/me/train.py", line 9 in spin'


def calling(function, line):
    """The stack of a user's own call to torch.distributed."""
    torch = [frame("/x/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper")]
    torch += [frame("/x/site-packages/torch/distributed/distributed_c10d.py", 900, function)]
    return [*OURS, frame("/home/me/train.py", line, "exchange", f"dist.{function}(x)"), *torch]


DONE = [entry(1, True), entry(1, True, group="2")]
MISMATCHES = {
    # rank 0: stack, its last collectives       rank 1                                               kinds of rank 0 and 1
    "another kind": (
        (
            calling("reduce_scatter_tensor", 7),
            [*DONE, entry(2, False)],
        ),  # gloo records it as an all_reduce
        (calling("all_gather_into_tensor", 9), [*DONE, entry(2, False, "gloo:all_gather")]),
        ("reduce_scatter", "all_gather"),
    ),
    "the recorder sees the same": (
        (calling("reduce_scatter_tensor", 7), [*DONE, entry(2, False)]),
        (calling("all_reduce", 9), [*DONE, entry(2, False)]),
        ("reduce_scatter", "all_reduce"),
    ),
    "another size": (
        (calling("all_reduce", 7), [*DONE, entry(2, False, size=(3,))]),
        (calling("all_reduce", 7), [*DONE, entry(2, False, size=(4,))]),
        ("all_reduce", "all_reduce"),
    ),
    "another line": (
        (calling("broadcast", 7), [*DONE, entry(2, False, "gloo:broadcast")]),
        (calling("broadcast", 9), [*DONE, entry(2, False, "gloo:broadcast")]),
        ("broadcast", "broadcast"),
    ),
    "one is through, as the source of a broadcast": (
        (
            calling("barrier", 8),
            [*DONE, entry(2, True, "gloo:broadcast"), entry(3, False, "gloo:barrier", size=())],
        ),
        (calling("all_gather", 7), [*DONE, entry(2, False, "gloo:all_gather")]),
        ("broadcast", "all_gather"),
    ),
    "another group": (
        (calling("all_reduce", 7), [*DONE, entry(2, False)]),
        (calling("all_reduce", 9), [*DONE, entry(2, False, group="2")]),
        ("all_reduce", "all_reduce"),
    ),
    "DDP and the user's own": (
        (IN_BACKWARD, [*DONE, entry(2, False)]),
        (calling("barrier", 9), [*DONE, entry(1, False, "gloo:barrier", group="0", size=())]),
        ("all_reduce", "barrier"),
    ),
    "no recorder": (
        (calling("reduce_scatter", 7), []),
        (calling("all_gather", 9), []),
        ("reduce_scatter", "all_gather"),
    ),
    "both receive": ((calling("recv", 7), DONE), (calling("recv", 9), DONE), ("recv", "recv")),
    "one receives": (
        (calling("recv", 7), DONE),
        (calling("all_reduce", 9), [*DONE, entry(2, False)]),
        ("recv", "all_reduce"),
    ),
}
AGREEMENTS = {
    "the same": (
        (calling("all_reduce", 7), [*DONE, entry(2, False)]),
        (calling("all_reduce", 7), [*DONE, entry(2, False)]),
    ),
    "one sends, one receives": ((calling("send", 7), DONE), (calling("recv", 9), DONE)),
    "the same, recorded": (
        (calling("send", 7), [*DONE, entry(2, False, "nccl:send 0->1") | {"is_p2p": True}]),
        (calling("recv", 9), [*DONE, entry(2, False, "nccl:recv 1<-0") | {"is_p2p": True}]),
    ),
    "gather: one brings more": (
        (calling("gather", 7), [*DONE, entry(2, False, "gloo:gather", size=(2,))]),
        (calling("gather", 7), [*DONE, entry(2, False, "gloo:gather", size=(3,))]),
    ),
}


def say(folder, said):
    for rank, (stack, entries) in enumerate(said):
        (folder / f"rank{rank}.state").write_text(json.dumps({"state": "S", "pid": 1}))
        (folder / f"rank{rank}.json").write_text(
            json.dumps({"stacks": {"MainThread": stack}, "collectives": entries})
        )


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_names_both_ranks_collectives_and_lines(tmp_path, case):
    *said, kinds = MISMATCHES[case]
    say(tmp_path, said)
    hang = find_hang(tmp_path, 2, late=[0, 1])
    assert hang.mismatch
    assert hang.mismatch.pair == (0, 1)
    assert tuple(call.record or call.kind for _, call in hang.mismatch.came) == kinds
    own = [stack[-3]["line"] if stack is not IN_BACKWARD else 30 for stack, _ in said]
    assert f":{own[0]} " in hang.where
    assert f":{own[1]} " in hang.waiting
    assert all(kind in hang.why for kind in kinds)
    assert hang.kind == "mismatch"


@pytest.mark.parametrize("case", AGREEMENTS)
def test_where_all_agree_the_network_is_the_suspect(tmp_path, case):
    say(tmp_path, AGREEMENTS[case])
    hang = find_hang(tmp_path, 2, late=[0, 1])
    assert (hang.mismatch, hang.kind) == (None, "network")


def test_without_a_recorder_the_rank_that_is_elsewhere_is_behind(tmp_path):
    say(tmp_path, [(calling("recv", 7), []), (IN_THEIR_CODE, [])])
    hang = find_hang(tmp_path, 2, late=[0, 1])
    assert (hang.rank, hang.kind) == (1, "behind")


def test_of_three_ranks_the_odd_one_is_named_first(tmp_path):
    most = (calling("all_reduce", 7), [*DONE, entry(2, False)])
    say(
        tmp_path,
        [most, (calling("barrier", 9), [*DONE, entry(2, False, "gloo:barrier", size=())]), most],
    )
    hang = find_hang(tmp_path, 3, late=[0, 1, 2])
    assert hang.mismatch
    assert (hang.rank, hang.mismatch.odd, hang.mismatch.calls[1].kind) == (1, 1, "barrier")
