"""Attacks on the grader: what an answer states counts, not what it mentions."""

import pytest

from paralab.analyse.blocks import Answer
from paralab.course.configurations import PRACTICALS
from paralab.course.judge import judge
from paralab.course.numbers import numbers_in
from tests.course.made_up import answers, made_up

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
        (NO, "Nein.", "right"),
        (NO, "Nein, langsamer", "not judged"),
        (NO, "Es ist langsamer", "not judged"),
        (NO, "Not at all.", "right"),
        (NO, "Of course not, it is slower", "right"),
        (NO, "DataParallel is slower than one device", "not judged"),
        (NO, "No, it is faster", "not judged"),
        (NO, "No, it is not faster", "right"),
        (YES, "Yes, it is slower", "not judged"),
        (NO, "No, because purple elephants dance", "not judged"),
        (NO, "No, it takes 900 ms", "not judged"),
        (NO, "asdf qwertz", "wrong"),
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
        (NO, "Notably yes", "not judged"),
        (NO, "Is it faster?", "missing"),
        (YES, "Yes, there is no doubt.", "right"),
        (YES, "Yes, but no.", "wrong"),
        (YES, "Yesterday it was", "wrong"),
        (EITHER, "Yes, one per rank", "not judged"),
        (EITHER, "Yes", "wrong"),
        (NOISY, "It is too noisy to tell.", "right"),
        (NOISY, "Yes, 1.02×", "not judged"),
        (NOISY, "noisy purple bananas", "not judged"),
        # numbers in the right places
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
        (MEMORY, "single: 122 MiB, all: 74 MiB", "not judged"),
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
        (WHEN, "backward bananas", "not judged"),
        (WHEN, "Is it in the backward pass?", "not judged"),
        (WHEN, "8 processes, all on GPU 5, backward", "not judged"),
        (WHEN, "In the backward pass. " * 60, "not judged"),
        (WHY, "central all-reduce each every no central", "not judged"),
    ],
)
def test_what_an_answer_states(question, written, status):
    assert judge(question, written, 0.25)[0] == status


# Realistic answers by practical, part, and question. None of them may be judged wrong.
NATURAL = {
    ("5", 3, "a"): ("No, it was slower: 30 ms instead of 30 ms.", "No because of the copying"),
    ("5", 4, "a"): ("No, nn.DataParallel does it automatically.", "No, we just call model(x)"),
    ("5", 4, "b"): ("It splits along dimension 0 into chunks of ceil(64/3) = 22.",),
    ("5", 4, "c"): ("If 64 is a multiple of the number of GPUs", "When there is no remainder"),
    ("5", 4, "d"): ("When the batch isn't divisible by the number of GPUs, e.g. 64/3",),
    ("5", 4, "e"): ("Since the chunk size is rounded up (22), the last device only gets 20",),
    ("5", 5, "c"): ("GPU 0", "On GPU 0, since all the outputs are gathered there"),
    ("5", 6, "a"): ("Simplicity", "You only need to wrap the model in one line"),
    ("6", 3, "b"): ("Every rank gets 64 // 2 = 32 samples", "32 each", "32/32"),
    ("6", 4, "b"): ("To average the gradients so that all replicas stay in sync",),
    ("6", 5, "b"): ("No, there's no central GPU anymore",),
    ("7", 2, "a"): ("Otherwise the gradient would be 4 times too large",),
    ("7", 4, "b"): ("fp16 has a small range so gradients would become zero",),
    ("10", 1, "q1"): ("Two processes", "There are 2 processes, rank 0 and rank 1"),
    ("10", 1, "q4"): ("Once per step, before the optimizer step", "at the end of each step"),
    ("10", 2, "q2"): ("As many as micro-batches: 2, 4 and 8",),
    ("10", 4, "q1"): ("It does not exist anymore", "rank 1 disappears, rank 0 does everything"),
    ("10", 5, "q1"): ("Both stages run on cpu:0, so the memory doubles",),
}
NONSENSE = (
    "banana",
    "8 processes, all on GPU 5",
    "I don't know",
    "gpu 0 last once mean zero underflow",
    "backward gradient average all-reduce device 0 micro stage rank zero faster memory",
    "The mean dog sums only GPU 0 every day",
    "What do you mean?",
    "asdf 42",
    "<script>alert(1)</script>",
    "Weil die Grafikkarten verschieden sind",
)


def answer_of(name, part, label):
    found = answers(name, made_up(name))
    return next(a for (n, q), a in found.items() if n == part and q.lower().startswith(label))


@pytest.mark.parametrize("place", NATURAL, ids=str)
def test_what_students_write_is_right(place):
    for written in NATURAL[place]:
        assert judge(answer_of(*place), written, 0.25, numbers_in("22 64 30 ms"))[0] == "right"


@pytest.mark.parametrize("name", PRACTICALS)
def test_nonsense_is_never_right(name):
    for answer in answers(name, made_up(name)).values():
        for written in NONSENSE:
            assert judge(answer, written, 0.25)[0] != "right", (answer.question, written)
