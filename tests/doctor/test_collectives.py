"""The ranks' collectives as a table, one row per rank; what parts them is seen in the row."""

import pytest

from paralab.doctor.collectives import Collective, changed_places, from_recorder, mismatches


def rows(text, done=0):
    """ "a4 a1 b8": all_reduce of 4 values, of 1, broadcast of 8; "a4@x" comes from line x. The
    first `done` are over."""
    calls = []
    for number, word in enumerate(text.split(), start=1):
        size, _, site = word[1:].partition("@")
        name = {"a": "all_reduce", "b": "broadcast"}[word[0]]
        calls.append(Collective("0", number, name, ((int(size),),), site or None, number <= done))
    return calls


def first(*texts, over=True, done=0):
    found = mismatches({rank: rows(text, done) for rank, text in enumerate(texts)}, over=over)
    return (found[0].kind, found[0].number, found[0].rank) if found else None


def test_where_ranks_part():
    assert first("a4 a1 b8", "a4 a1 b8", done=3) is None
    assert first("a4 a1 b8", "a4 a1   ") == ("behind", 3, 1)
    assert first("a4 a1   ", "a4 a1 b8") == ("behind", 3, 0)
    assert first("a4 a1 b8", "a4 b8 a1") == (
        "operation",
        2,
        None,
    )  # of two, either may be the wrong one
    assert first("a4 a1", "a4 b8", "a4 a1") == ("operation", 2, 1)
    assert first("a4 a1", "a4 a7") == ("size", 2, None)
    assert first("a4@5 a4@6", "a4@6 a4@5") == ("site", 1, None)
    assert first("a4@5", "a4@6", "a4@6") == ("site", 1, 0)
    assert first("a4", "a4 a4", "a4 a4", "a4") == ("behind", 2, None)
    assert first("a4 a1", "a4 a1", done=1) == ("stuck", 2, None)


def test_two_that_changed_places_are_certain_another_line_alone_is_not():
    swapped = mismatches({0: rows("a1@5 a1@6 a4@7", done=3), 1: rows("a1@6 a1@5 a4@7", done=3)})
    branches = mismatches({0: rows("a1@5 a4@7", done=2), 1: rows("a1@6 a4@7", done=2)})
    assert [found.swapped for found in (*swapped, *branches)] == [True, False]
    assert (
        first("b8@5 a1@7", "b8@6 a1@7", done=2) is None
    )  # a broadcast has a line for its root and one for the others


def test_while_ranks_run_being_behind_counts_only_where_another_waits():
    assert first("a4 a1 b8", "a4 a1", over=False, done=3) is None
    assert first("a4 a1 b8", "a4 a1", over=False, done=2) == ("behind", 3, 1)
    assert first("a4 a1", "a4 a1", over=False, done=1) is None  # under way


def test_a_recorder_that_forgot_the_oldest_is_compared_where_both_remember():
    long, short = rows("b8 a4 a1"), rows("a4 a4 a1")[1:]
    assert mismatches({0: long, 1: short}, over=False) == []


def test_unequal_sizes_are_the_business_of_some_operations():
    calls = [Collective("0", 1, "all_to_all", ((size,),), None, True) for size in (3, 5)]
    assert mismatches({0: calls[:1], 1: calls[1:]}, over=True) == []


def test_entries_of_the_flight_recorder():
    entry = {
        "collective_seq_id": 7,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]],
        "state": "completed",
        "frames": [
            {
                "filename": "/env/site-packages/torch/distributed/distributed_c10d.py",
                "line": 9,
                "name": "all_reduce",
            },
            {"filename": "/home/ann/train.py", "line": 31, "name": "step"},
        ],
    }
    assert from_recorder([entry, {"is_p2p": True}]) == [
        Collective("0", 7, "all_reduce", ((4, 2),), "/home/ann/train.py:31", True)
    ]


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
