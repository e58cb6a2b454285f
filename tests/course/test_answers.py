"""The answers follow the numbers: they change when invented measurements change."""

import pytest

from paralab.analyse.blocks import Answer, Table
from paralab.course.configurations import PRACTICALS
from paralab.course.practical import blank
from tests.course.made_up import answers, fill_sheet, made_up, slow_down

# The parts of each course document, and the number of questions in each part.
COURSE = {
    "5": {1: 0, 2: 0, 3: 3, 4: 5, 5: 3, 6: 3},
    "6": {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3},
    "7": {1: 1, 2: 3, 3: 3, 4: 3, 5: 3},
    "10": {1: 5, 2: 2, 3: 2, 4: 2, 5: 2},
    "handbook": {1: 1, 2: 2, 3: 2, 4: 0, 5: 1},
}


def count_questions(sections):
    return {
        int(section.title.split(":")[0].split()[1]): sum(
            isinstance(block, Answer) for block in section.blocks
        )
        for section in sections
    }


@pytest.mark.parametrize("name", PRACTICALS)
def test_a_sheet_has_the_parts_and_questions_of_the_course(name):
    filled = fill_sheet(name, made_up(name)).sections
    assert count_questions(filled) == COURSE[name]
    empty = blank(name).sections
    assert [section.title for section in empty] == [section.title for section in filled]
    assert count_questions(empty) == COURSE[name]


@pytest.mark.parametrize("name", PRACTICALS)
def test_every_cell_is_filled_and_every_question_answered(name):
    for section in fill_sheet(name, made_up(name)).sections:
        assert len(section.text) > 20
        for block in section.blocks:
            if isinstance(block, Answer):
                assert len(block.text) > 20, block
                assert "  " not in block.text
            elif isinstance(block, Table):
                cells = [cell for line in block.rows for cell in line[1:]]
                assert all(len(line) == len(block.columns) for line in block.rows)
                assert all(cell.text.strip() and "None" not in cell.text for cell in cells), block


@pytest.mark.parametrize("name", PRACTICALS)
def test_a_blank_sheet_has_no_solution(name):
    for section in blank(name).sections:
        for block in section.blocks:
            if isinstance(block, Answer):
                assert (block.text, block.evidence, block.verdict) == ("", {}, None)
                assert (block.terms, block.choice) == ((), None)
            else:
                assert all(not cell.text.strip() for line in block.rows for cell in line[1:])


FASTER = 3, "a) Is DataParallel faster?"


@pytest.mark.parametrize(
    ("factor", "faster", "proportional"),
    [(0.50, True, True), (0.70, True, False), (1.00, False, False), (1.50, False, False)],
)
def test_data_parallel_is_faster_or_slower(factor, faster, proportional):
    rows = made_up("5")
    slow_down(rows["dp2"], factor)
    found = answers("5", rows)
    assert found[FASTER].verdict is faster
    assert (
        found[3, "b) Is the speed-up proportional to the number of GPUs?"].verdict is proportional
    )


def test_noisy_rounds_are_not_the_same_as_no_difference():
    rows = made_up("5")
    same = answers("5", rows)[FASTER]
    rows["dp2"]["round_seconds"] = [0.010, 0.030, 0.060]
    noisy = answers("5", rows)[FASTER]
    assert (same.verdict, noisy.verdict) == (False, None)
    for row in rows.values():
        row["round_seconds"] = row["round_seconds"][:1]
    assert answers("5", rows)[FASTER].verdict is None


def test_device_0_is_busier_only_where_it_works_longer():
    rows = made_up("5")
    question = 5, "a) Is GPU 0 more loaded than the others?"
    assert answers("5", rows)[question].verdict is False
    rows["dp2"]["metrics"]["busy"][1]["share"] = 0.2
    assert answers("5", rows)[question].verdict is True
    loads = [{"device": f"cuda:{n}", "utilization": 0.5, "used_bytes": 1} for n in range(2)]
    rows["dp2"]["metrics"]["load"]["gpu"] = loads  # NVML counts more than our spans
    assert answers("5", rows)[question].verdict is False


def test_the_split_is_torch_chunk_s():
    rows = made_up("5")
    why = answers("5", rows)[4, "e) Why?"]
    assert why.evidence == {"rounded up": 22, "last": 20}
    assert "22/21/21" in why.text  # a fair split, which torch.chunk does not use


def test_the_work_of_device_0_grows_with_the_devices():
    rows = made_up("5")
    for key, seconds in (("dp2", 0.0023), ("dp3", 0.0045), ("dp5", 0.0090)):
        rows[key]["observed"]["copying"]["replicate"] = seconds
    found = answers("5", rows)[6, "c) Why may it not scale to many GPUs?"]
    assert [found.evidence[f"replicate, {n} devices"] for n in (2, 3, 5)] == [
        0.0023,
        0.0045,
        0.0090,
    ]


def test_ddp_or_data_parallel():
    rows = made_up("6")
    question, balanced = (6, "a) Which one is faster?"), (5, "b) Is GPU 0 still a bottleneck?")
    assert answers("6", rows)[question].choice == "neither"
    slow_down(rows["ddp2"], 0.5)
    assert answers("6", rows)[question].choice == "DDP"
    slow_down(rows["ddp2"], 4)
    assert answers("6", rows)[question].choice == "DataParallel"
    assert answers("6", rows)[balanced].verdict is False
    straggler = {"rank": 0, "waited_seconds": 0.01, "share_of_step": 0.3, "last_in": 9, "of": 9}
    rows["ddp2"]["metrics"]["straggler"] = straggler
    assert answers("6", rows)[balanced].verdict is True


def test_accumulation_and_low_precision():
    rows = made_up("7")
    saves = 5, "a) Which one saves more memory?"
    for entry in rows["accumulate"]["peak_bytes"]:
        entry["bytes"] = 10 * 2**20
    assert answers("7", rows)[saves].choice == "accumulation"
    for entry in rows["bf16"]["peak_bytes"]:
        entry["bytes"] = 5 * 2**20
    assert answers("7", rows)[saves].choice == "mixed precision"
    synchronized = 1, "Are the gradients synchronized in every backward pass?"
    assert answers("7", rows)[synchronized].verdict is False


def test_a_machine_without_low_precision_says_so():
    rows = made_up("7")
    failed = [
        (key, "no bf16 here") for key in ("bf16", "fp16", "both", "faint_bare", "faint_scaled")
    ]
    rows = {key: row for key, row in rows.items() if key not in dict(failed)}
    found = answers("7", rows, failed)
    assert "no bf16 here" in found[3, "Is it faster?"].text
    assert found[5, "c) Can both be combined?"].verdict is None


def test_a_part_without_its_configuration_says_why():
    rows = made_up("5")
    del rows["dp2"]
    sections = fill_sheet("5", rows, [("dp2", "out of memory")]).sections
    assert "out of memory" in sections[2].text
    assert not sections[2].blocks


def test_the_pattern_of_the_hybrid():
    rows = made_up("10")
    changes, several = (
        (3, "Q1 Does the pattern of execution change?"),
        (5, "Q2 Are several GPUs still used?"),
    )
    found = answers("10", rows)
    assert (found[changes].verdict, found[several].verdict) == (False, False)
    rows["double"]["all_reduces_per_step"] = 9
    assert answers("10", rows)[changes].verdict is True


@pytest.mark.parametrize("name", PRACTICALS)
def test_replicas_that_share_one_gpu_give_a_sheet_without_a_load(name):
    rows = made_up(name)
    for row in rows.values():
        row["device"] = "cuda"
        row["peak_bytes"] = [entry | {"how": "allocator"} for entry in row["peak_bytes"][:1]]
        row["metrics"] |= {"busy": [], "balance": None}
        row["observed"]["copying"] = {}  # copies happen inside nn.DataParallel's own calls
    for section in fill_sheet(name, rows).sections:
        assert all(block.text for block in section.blocks if isinstance(block, Answer))
