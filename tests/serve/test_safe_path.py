"""No name, link, or manifest leads out of the served folder."""

import json
import os

import pytest

from paralab.serve.class_table import ClassTable
from paralab.serve.runs import Listing
from paralab.serve.safe_path import NotServed, find_folder, open_folder, require_inside


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    (folder / "events").mkdir(parents=True)
    (folder / "manifest.json").write_text('{"secret": true}')
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../outside",
        "ddp/../../outside",
        "/etc",
        "//etc",
        "missing",
        "ddp/manifest.json",  # a file
        "ddp\\..",
        "ddp\0",
    ],
)
def test_only_names_of_folders_inside_are_served(served, outside, name):
    with pytest.raises(NotServed):
        find_folder(served, name)


def test_folders_inside_are_served(served):
    assert open_folder(served, "ddp") == served / "ddp"
    assert open_folder(served, "low_precision/00_single/round1").is_dir()
    assert open_folder(served, ".").samefile(served)
    (served / "latest").symlink_to("ddp")  # a link that stays inside
    assert open_folder(served, "latest").samefile(served / "ddp")


def test_a_folder_that_is_a_link_out_is_refused(served, outside):
    (served / "evil").symlink_to(outside)
    with pytest.raises(NotServed):
        find_folder(served, "evil")


@pytest.mark.parametrize("file", ["manifest.json", "events/rank0.jsonl", "logs", "result.json"])
def test_a_link_in_a_run_folder_that_leads_out_is_refused(served, outside, file):
    path = served / "ddp" / file
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "manifest.json")
    with pytest.raises(NotServed):
        open_folder(served, "ddp")
    [row] = [row for row in Listing(served).read() if row.name == "ddp"]
    assert (row.status, row.kind) == ("damaged", "unknown")
    assert "points outside" in row.reason


def test_a_link_chain_that_leads_out_is_refused(served, outside):
    (served / "ddp" / "logs").symlink_to("../hop")
    (served / "hop").symlink_to(outside)
    with pytest.raises(NotServed):
        open_folder(served, "ddp")


def test_a_loop_of_links_is_refused(served):
    (served / "ddp" / "logs").symlink_to("logs")
    with pytest.raises(NotServed):
        open_folder(served, "ddp")


def test_a_pipe_which_would_block_the_reader_is_refused(served):
    os.mkfifo(served / "ddp" / "result.json")
    with pytest.raises(NotServed):
        open_folder(served, "ddp")


@pytest.mark.parametrize("file", ["manifest.json", "result.json", "failures.jsonl", "sheet.md"])
def test_a_file_that_would_fill_the_memory_is_refused(served, file):
    """60 viewers of a list with one such file once needed 4 GB."""
    with (served / "ddp" / file).open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(NotServed):
        open_folder(served, "ddp")
    [row] = [row for row in Listing(served).read() if row.name == "ddp"]
    assert "1.0 TiB" in row.reason


@pytest.mark.parametrize("file", ["manifest.json", "outcome.json"])
@pytest.mark.parametrize("absolute", [True, False])
def test_an_experiment_that_names_a_run_outside_is_refused(served, outside, file, absolute):
    path = served / "low_precision" / file
    content = json.loads(path.read_text())
    content["configurations"][0]["runs"][0] = str(outside) if absolute else "../../outside"
    path.write_text(json.dumps(content))
    with pytest.raises(NotServed):
        open_folder(served, "low_precision")


def test_a_link_of_one_student_is_only_their_problem(served, outside):
    for student in ("ada", "eve"):
        (served / "class" / student).mkdir(parents=True)
    (served / "class" / "eve" / "sheet.md").symlink_to(outside / "manifest.json")
    table = ClassTable(served, "class", "5")
    while table.grade_next():
        pass
    problems = {each.student: each.problem for each in table.submissions}
    assert problems["ada"] == "ada has no run for practical 5."
    assert "points outside" in problems["eve"]


def test_a_folder_without_links_is_accepted(served):
    require_inside(served, served)
