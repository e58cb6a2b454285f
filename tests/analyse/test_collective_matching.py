"""Collectives as a table with one row per rank, in which the mismatch is visible."""

import pytest

from paralab.analyse.collective_matching import (
    CollectiveCall,
    changed_places,
    differ,
    find_mismatches,
    from_flight_recorder,
    kind_of,
)

KINDS = {"a": "all_reduce", "b": "broadcast", "g": "gather", "s": "send", "r": "recv"}


def row(text, group="0", start=1):
    """ "a4 a1@5 b8!" is an all_reduce of 4 values, one of 1 value on line 5, and a broadcast of 8
    values in which the rank waits. "?" is a call of which only the number is known."""
    calls = []
    for number, word in enumerate(text.split(), start=start):
        size, _, site = word[1:].rstrip("!").partition("@")
        shapes = ((int(size),),) if size else None
        is_open = word.endswith("!")
        kind = KINDS.get(word[0])
        calls.append(
            CollectiveCall(kind, group, number, shapes, None, site or None, is_open=is_open)
        )
    return calls


def first(*texts, over=False):
    found = find_mismatches({rank: row(text) for rank, text in enumerate(texts)}, over=over)
    return (found[0].kind, found[0].number, found[0].odd) if found else None


def test_the_first_mismatch():
    assert first("a4 a1 b8 ", "a4 a1 b8 ") is None
    assert first("a4 a1 b8!", "a4 a1    ") == ("behind", 3, 1)
    assert first("a4 a1    ", "a4 a1 b8!") == ("behind", 3, 0)
    assert first("a4 a1 b8 ", "a4 b8 a1 ") == ("operation", 2, None)  # either may be wrong
    assert first("a4 a1", "a4 b8", "a4 a1") == ("operation", 2, 1)
    assert first("a4 a1 b8 ", "a4 a7 b8 ") == ("size", 2, None)
    assert first("a4@5 a4@6 ", "a4@6 a4@5 ") == ("site", 1, None)  # H05: wrong sums, no error
    assert first("a4@5", "a4@6", "a4@6") == ("site", 1, 0)
    assert first("a4", "a4 a4!", "a4 a4!", "a4") == ("behind", 2, None)
    assert first("", "a4!") == ("behind", 1, 0)


def test_while_ranks_run_one_that_nobody_waits_for_is_not_behind():
    assert first("a4 a1 b8 ", "a4 a1    ") is None
    assert first("a4 a1 b8 ", "a4 a1    ", over=True) == ("behind", 3, 1)
    assert first("a4 a1!", "a4 a1!") is None  # under way
    assert first("a4 a1!", "a4 a1!", over=True) == ("stuck", 2, None)


def test_another_dtype_is_another_size():
    one, other = (CollectiveCall("all_reduce", "0", 1, ((4,),), dtype) for dtype in ("f32", "f16"))
    assert differ(one, other) == "size"
    assert differ(one, CollectiveCall("all_reduce", "0", 1, ((2, 2),), "f32")) is None
    assert differ(one, CollectiveCall("all_reduce", "0", 1)) is None  # its size is unknown


def test_a_gather_may_bring_different_sizes():
    assert first("g3", "g5") is None


def test_a_rank_that_left_or_is_elsewhere_is_behind_and_its_last_call_is_known():
    (found,) = find_mismatches({0: row("a4 a1 b8!"), 1: row("a4 a1")})
    assert found.behind == (1,)
    assert str(found.last[1]) == "all_reduce of 1 value"
    assert [(rank, str(call)) for rank, call in found.came] == [(0, "broadcast of 8 values")]


def test_numbers_far_apart_are_not_the_same_collective():
    """The watchdog of rank 0 waits in collective 0, and that of rank 1 in collective 32,000."""
    (found,) = find_mismatches({0: row("a4!", start=0), 1: row("a4!", start=32_000)})
    assert (found.kind, found.number, found.behind) == ("behind", 32_000, (0,))
    assert found.calls[0] is None
    assert found.last[0].number == 0
    assert found.last[0].is_open


def test_a_number_alone_tells_how_far_a_rank_came():
    assert first("? a1!", "? ? ?") is None  # "last enqueued: 3" means that number 2 is done
    assert first("? a1!", "?") == ("behind", 2, 1)


def test_a_recorder_that_forgot_the_oldest_calls_is_compared_where_both_remember():
    assert find_mismatches({0: row("b8 a4 a1"), 1: row("a4 a1", start=2)}) == []


def test_every_group_counts_on_its_own():
    pipeline = {
        0: [*row("a4 a4!", "1"), *row("a1", "0")],
        1: [*row("a4", "1"), *row("a1", "0")],
        2: [*row("a4 a4 a4", "2"), *row("a1", "0")],
    }
    (found,) = find_mismatches(pipeline)
    assert (found.group, found.number, found.behind) == ("1", 2, (1,))
    (found,) = find_mismatches({0: row("a4!", "1"), 1: [], 2: []}, members={"1": (0, 2)})
    assert found.behind == (2,)  # rank 1 is not in this group


def test_two_ranks_that_wait_for_each_other_in_different_groups():
    found = find_mismatches(
        {0: [*row("a4", "2"), *row("a4 a4!", "1")], 1: [*row("a4", "1"), *row("a4 b8!", "2")]}
    )[0]
    assert (found.kind, str(found.calls[0]), str(found.calls[1])) == (
        "groups",
        "all_reduce of 4 values",
        "broadcast of 8 values",
    )


def waits(word):
    """A call that is known only from a stack."""
    return [CollectiveCall(KINDS[word[0]], None, None, site=word[1:] or None, is_open=True)]


@pytest.mark.parametrize(
    ("mine", "its", "kind"),
    [
        (waits("a"), waits("b"), "operation"),
        (waits("a5"), waits("a6"), "site"),
        (waits("a5"), waits("a5"), None),
        (waits("a"), [], "behind"),
        (waits("r5"), waits("r6"), "operation"),  # both ranks receive, and none sends
        (waits("s5"), waits("r6"), None),
        (waits("r5"), row("a4 a4!"), "operation"),
    ],
)
def test_calls_without_numbers(mine, its, kind):
    found = find_mismatches({0: mine, 1: its})
    assert [mismatch.kind for mismatch in found if mismatch.number is None] == [kind] * bool(kind)


def test_calls_that_changed_places():
    (swapped,) = find_mismatches({0: row("a1@5 a1@6 a4@7"), 1: row("a1@6 a1@5 a4@7")})
    (branches,) = find_mismatches({0: row("a1@5 a4@7"), 1: row("a1@6 a4@7")})
    assert (swapped.swapped, branches.swapped) == (True, False)


@pytest.mark.parametrize(
    ("mine", "its", "many"),
    [
        ("ab", "ba", 2),
        ("abc", "cab", 3),
        ("abcd", "badc", 2),
        ("ab", "bc", 0),
        ("ab", "b", 0),
        ("a", "a", 0),
    ],
)
def test_how_many_calls_have_changed_places(mine, its, many):
    assert changed_places(mine, its) == many


def test_names_of_collectives():
    names = "all_reduce allreduce _all_gather_base all_gather_into_tensor ALLTOALL_BASE isend wait"
    kinds = ["all_reduce", "all_reduce", "all_gather", "all_gather", "all_to_all", "send", None]
    assert [kind_of(name) for name in names.split()] == kinds


def test_entries_of_the_flight_recorder():
    entry = {
        "collective_seq_id": 7,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]],
        "state": "completed",
        "frames": [
            {"filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 9},
            {"filename": "/home/ann/train.py", "line": 31, "name": "step"},
        ],
    }
    line = "/home/ann/train.py:31"
    root = entry | {"profiling_name": "nccl:broadcast", "retired": False, "state": "started"}
    p2p = entry | {"profiling_name": "nccl:send 0->1", "is_p2p": True}
    assert from_flight_recorder([entry, root, p2p]) == [
        CollectiveCall("all_reduce", "0", 7, ((4, 2),), None, line, line),
        # The root of a broadcast may call it from another line.
        CollectiveCall("broadcast", "0", 7, ((4, 2),), None, None, line, is_open=True),
        CollectiveCall("send", None, None, ((4, 2),), None, None, line),
    ]
