"""Follow a Slurm job whose controller does not answer, forgets the job, or requeues it. Each test
lists Slurm's answers, one per query."""

import json
from dataclasses import replace

import pytest

from paralab.errors import ParalabError, RunFailed
from paralab.launch import slurm_job as submitting
from paralab.launch.slurm import SlurmJob
from paralab.record.folder import RunFolder
from tests.launch.fakes import make_job

RUNNING, COMPLETED = SlurmJob(7, "RUNNING", nodes="n1"), SlurmJob(7, "COMPLETED", nodes="n1")
AWAY = ParalabError("Slurm does not answer: Unable to contact slurm controller.")


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Query once per answer without waiting; return the final job and the printed lines."""

    def follow(*answers, wait_seconds=None):
        said, left = [], list(answers)

        def look(number):
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(submitting.slurm, "query", look)
        monkeypatch.setattr(submitting.slurm, "cancel", lambda number: said.append("cancelled"))
        monkeypatch.setattr(submitting.slurm, "list_nodes", lambda: "n1 gpu:2")
        monkeypatch.setattr(submitting, "QUERY_SECONDS", (0.0, 0.0))
        monkeypatch.setattr(submitting, "POLL_SECONDS", 0.001)
        following = submitting.JobFollower(
            7, RunFolder(tmp_path), wait_seconds, replace(make_job(tmp_path)[0], say=said.append)
        )
        try:
            return following.follow(), said
        except RunFailed as error:
            return error, said

    return follow


def test_every_change_is_printed_once(follow):
    waits = SlurmJob(7, "PENDING", "Priority")
    job, said = follow(waits, waits, RUNNING, RUNNING, COMPLETED)
    assert job == COMPLETED
    assert said == [
        "Slurm job 7: PENDING (Priority: other jobs come first)",
        "Slurm job 7: RUNNING on n1",
        "Slurm job 7: COMPLETED on n1",
    ]


def test_a_silent_controller_gets_time_to_answer(follow, monkeypatch):
    assert follow(RUNNING, AWAY, AWAY, COMPLETED)[0] == COMPLETED
    monkeypatch.setattr(submitting, "SILENT_SECONDS", -1.0)
    with pytest.raises(ParalabError, match="scontrol show job 7"):
        follow(RUNNING, AWAY)


@pytest.mark.parametrize(("result", "state"), [(True, "COMPLETED"), (False, "FAILED")])
def test_a_forgotten_jobs_files_show_how_it_ended(follow, tmp_path, result, state):
    (tmp_path / "run-7").mkdir()
    if result:
        (tmp_path / "run-7" / "result.json").write_text(json.dumps({}))
    assert follow(RUNNING, None)[0].state == state


def test_a_requeued_job_has_not_ended(follow):
    lost, again = (
        SlurmJob(7, "NODE_FAIL", nodes="n1"),
        SlurmJob(7, "PENDING", "BeginTime", restarts=1),
    )
    done = SlurmJob(7, "COMPLETED", restarts=1)
    assert follow(RUNNING, lost, again, done)[0] == done
    assert follow(RUNNING, lost, lost)[0] == lost


def test_the_waiting_time_depends_on_the_reason(follow, monkeypatch):
    """paralab soon gives up if waiting cannot help. Otherwise, it waits as long as requested."""
    busy, never = SlurmJob(7, "PENDING", "Resources"), SlurmJob(7, "PENDING", "PartitionNodeLimit")
    monkeypatch.setattr(submitting, "STUCK_SECONDS", 0.005)
    assert follow(*[busy] * 20, COMPLETED)[0] == COMPLETED
    error, said = follow(*[never] * 1000)
    assert "PENDING (PartitionNodeLimit)" in error.problem
    assert "n1 gpu:2" in error.detail
    assert said[-1] == "cancelled"
    error, said = follow(*[busy] * 1000, wait_seconds=0.005)
    assert "PENDING (Resources)" in error.problem
    assert said[-1] == "cancelled"
