"""Attacks on the grader: what an answer states counts, not what it mentions."""

import pytest

from paralab.analyse.blocks import Answer
from paralab.course.judge import judge

BOTH = ("DDP|DistributedDataParallel|distributed data parallel", "DataParallel|data parallel|DP")
DDP = Answer("a) Which one is faster?", "…", {"ratio": 1.5}, choice="DDP", options=BOTH)
DP = Answer("a) Which one is faster?", "…", {"ratio": 0.5}, choice="DataParallel", options=BOTH)
SAME = Answer("a) Which one is faster?", "…", {"ratio": 1.0}, choice="neither", options=BOTH)
NO = Answer("a) Is it faster?", "…", {"speed-up": 0.66}, verdict=False)
YES = Answer("a) Is it faster?", "…", {"speed-up": 1.66}, verdict=True)
NOISY = Answer("a) Is it faster?", "…", {"speed-up": 1.02}, undecided=True)
PROCESSES = Answer("Q1 How many processes are there?", "…", {"processes": 2})
DEVICES = Answer("Q2 Which GPUs does each rank use?", "…", {"devices": [0, 2, 1, 3]})
PASSES = Answer("Q2 How many passes are there?", "…", {"passes": [2, 4, 8]})
MEMORY = Answer("c) How does the memory differ?", "…", {"single": 74 * 2**20, "all": 122 * 2**20})
WHEN = Answer("a) When does it happen?", "…", {"all-reduces": 2}, terms=("backward",))
WHY = Answer("c) Why?", "…", {}, terms=("no central|central|all-reduce", "each|every|no"))
EITHER = Answer("Q2 Are several GPUs used?", "…", {}, verdict=False, terms=("per rank|each rank",))


@pytest.mark.parametrize(
    ("question", "written", "status"),
    [
        # which one
        (DDP, "DDP", "right"),
        (DDP, "DDP is.", "right"),
        (DDP, "`DistributedDataParallel`", "right"),
        (DDP, "distributed data parallel, by far", "right"),
        (DDP, "DDP is faster than DataParallel.", "right"),
        (DDP, "DataParallel is slower than DDP.", "right"),
        (DDP, "DDP, because DataParallel has a bottleneck on GPU 0.", "right"),
        (DDP, "DDP, not DP", "right"),
        (DDP, "DDP rather than DP", "right"),
        (DDP, "DDP. It runs 1.5× as fast as DP (95 % CI 1.4–1.6).", "right"),
        (DDP, "DDP outperforms DataParallel", "right"),
        (DDP, "DataParallel", "wrong"),
        (DDP, "DDP is slower than DataParallel.", "wrong"),
        (DDP, "data parallel", "wrong"),
        (DDP, "Neither.", "wrong"),
        (DDP, "Both are the same.", "wrong"),
        (DDP, "The blue one", "wrong"),
        (DDP, "ddp is slower than single", "not judged"),
        (DDP, "DDP is not faster.", "not judged"),
        (DDP, "DDP isn't faster than DP", "not judged"),
        (DDP, "DDP is faster. No wait, DataParallel is faster.", "not judged"),
        (DDP, "DDP, it is 7.3 times as fast.", "not judged"),
        (DDP, "DDP, it is 1.5 times as fast.", "right"),
        (DDP, "DDP. It overlaps, and DataParallel saves nothing.", "right"),
        (DDP, "DDP. But DataParallel is faster.", "not judged"),
        (DDP, "DDP or DataParallel", "not judged"),
        (DDP, "It depends on DDP and DP", "not judged"),
        (DP, "DDP is slower than DP", "right"),
        (DP, "DDP is faster than DP", "wrong"),
        (DP, "ddp is slower than single", "not judged"),
        (SAME, "Neither, they take the same time", "right"),
        (SAME, "There is no measurable difference.", "right"),
        (SAME, "DDP", "wrong"),
        # yes or no
        (NO, "No.", "right"),
        (NO, "**no**, it is slower", "right"),
        (NO, "- No", "right"),
        (NO, "Answer: No", "right"),
        (NO, "Nein, langsamer", "right"),
        (NO, "No, there is no speed-up", "right"),
        (NO, "No, it is 0.66 times as fast", "right"),
        (NO, "No, it is 1.52× slower", "right"),
        (NO, "No, it is 9× slower", "not judged"),
        (NO, "Yes", "wrong"),
        (NO, "Yes and no", "wrong"),
        (NO, "No. Yes.", "wrong"),
        (NO, "no/yes", "wrong"),
        (NO, "It depends", "wrong"),
        (NO, "Not sure", "wrong"),
        (NO, "Notably yes", "wrong"),
        (NO, "Is it faster?", "missing"),
        (YES, "Yes, there is no doubt.", "right"),
        (YES, "Yes, but no.", "wrong"),
        (YES, "Yesterday it was", "wrong"),
        (EITHER, "Yes, one per rank", "not judged"),
        (EITHER, "Yes", "wrong"),
        (NOISY, "It is too noisy to tell.", "right"),
        (NOISY, "Yes, 1.02×", "not judged"),
        # numbers in their places
        (PROCESSES, "2", "right"),
        (PROCESSES, "2 processes", "right"),
        (PROCESSES, "Two.", "right"),
        (PROCESSES, "There are two of them.", "right"),
        (PROCESSES, "2 worker processes, one per GPU", "right"),
        (PROCESSES, "processes: 2", "right"),
        (PROCESSES, "8 processes, all on GPU 5", "wrong"),
        (PROCESSES, "8 processes on 2 GPUs", "wrong"),
        (PROCESSES, "2 GPUs and 8 processes", "wrong"),
        (PROCESSES, "processes: 8, ranks: 2", "wrong"),
        (PROCESSES, "3", "wrong"),
        (PROCESSES, "2.5", "wrong"),
        (PROCESSES, "2 GPUs", "not judged"),
        (PROCESSES, "a lot", "not judged"),
        (PROCESSES, "How many processes are there?", "missing"),
        (DEVICES, "Rank 0 uses cuda:0 and cuda:2, rank 1 cuda:1 and cuda:3.", "right"),
        (DEVICES, "rank 0: 0, 2; rank 1: 1, 3", "right"),
        (DEVICES, "Rank 0 uses GPUs 1 and 3, rank 1 uses GPUs 0 and 2.", "not judged"),
        (DEVICES, "all on GPU 5", "wrong"),
        (DEVICES, "all on GPU 0", "not judged"),
        (PASSES, "2, 4 and 8", "right"),
        (PASSES, "8, 4 and 2", "not judged"),
        (PASSES, "16 and 32", "wrong"),
        (MEMORY, "74 MiB on one device, 122 MiB in total", "right"),
        (MEMORY, "77,6 MB and 0.128 GB", "right"),
        (MEMORY, "74 and 122", "wrong"),  # bytes
        (MEMORY, "740 MiB and 900 MiB", "wrong"),
        (MEMORY, "74 MiB", "not judged"),
        (MEMORY, "single: 74 MiB, all: 122 MiB", "right"),
        (MEMORY, "single: 122 MiB, all: 74 MiB", "wrong"),
        # key terms
        (WHEN, "In the backward pass, 2 all-reduces.", "right"),
        (WHEN, "During backward().", "right"),
        (WHEN, "Not in the backward pass but before it.", "not judged"),
        (WHEN, "It doesn't happen in backward", "not judged"),
        (WHEN, "In the backward pass, with 900 all-reduces.", "not judged"),
        (WHEN, "In the forward pass.", "not judged"),
        (WHEN, "When does it happen?", "missing"),
        (WHY, "There is no central GPU.", "right"),
        (WHY, "Each rank takes part in the all-reduce.", "right"),
        (WHY, "lorem ipsum", "not judged"),
        (WHY, "central all-reduce each every no central", "not judged"),
    ],
)
def test_what_an_answer_states(question, written, status):
    assert judge(question, written, 0.25)[0] == status
