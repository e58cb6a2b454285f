"""Ranks under torchrun and srun, without processes: the notes they exchange, and how they stop
together."""

import signal
from dataclasses import asdict, replace

import pytest

from paralab.errors import UsageError
from paralab.launch import joined_ranks
from paralab.launch.joined_ranks import Team, adapt_to_restart, ended_with, follow, lead
from paralab.launch.launched_by import LaunchedRank
from paralab.launch.ranks import RankExits
from paralab.launch.run_options import RunOptions
from paralab.launch.stop import OtherFailed, StopRequest, StopTogether
from paralab.launch.watchdog import LateRank
from paralab.record.status_board import NEVER, Post
from tests.launch.fakes import Clock, FakeStore, exits, make_job, write_events

PLACE = LaunchedRank("torchrun", 0, 2, 0, 0, "abc/0", 0, "localhost", 1, True)
FACTS = {"node": 0, "name": "n1", "machine": "A", "local_rank": None, "gpus": [], "cores": 4}
FACTS |= {"mask": [0, 1, 2, 3], "address": None}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_restarted_rank_resumes_in_a_new_folder(tmp_path):
    given = RunOptions(out=tmp_path, checkpoint=tmp_path / "kept")
    assert adapt_to_restart(PLACE, given) == given
    restarted = adapt_to_restart(replace(PLACE, restarts=2), given)
    assert (restarted.out.name, restarted.resume) == (f"{tmp_path.name}-restart2", True)
    without = adapt_to_restart(replace(PLACE, restarts=2), RunOptions(out=tmp_path / "new"))
    assert (without.out.name, without.resume) == ("new", False)
    with pytest.raises(UsageError, match="torchrun --max-restarts"):
        adapt_to_restart(PLACE, RunOptions(max_restarts=1))


def note(code, phase="end", **fields):
    return asdict(RankExits([code], [Post(phase, 9, 0.0, False)], **fields))


def team(store, rank=0):
    return Team(replace(PLACE, rank=rank), store, "localhost", "tcp://…")


@pytest.fixture
def run_rank_0(tmp_path, monkeypatch, clock):
    """Run the leader of a job. Its own rank exits like `own`, and rank 1 has left the note
    `other`."""
    monkeypatch.setattr(joined_ranks.atexit, "register", lambda *arguments, **options: None)

    def run_rank_0(own, other, status="completed", folder="run", **options):
        def run_rank(team, work, request, show_progress):
            write_events(tmp_path / folder, status)
            return own

        monkeypatch.setattr(Team, "run_rank", run_rank)
        store = FakeStore(facts_0={**FACTS, "rank": 0}, facts_1={**FACTS, "rank": 1}, sees_1=True)
        if other:
            store.put("ended/1", other)
        job, _ = make_job(tmp_path / folder, **options)
        return lead(team(store), job), store.notes

    return run_rank_0


def test_rank_0_tells_the_others_what_to_do_and_reports(run_rank_0, tmp_path):
    outcome, notes = run_rank_0(exits(0), note(0))
    assert outcome.status == "completed"
    assert outcome.exits.codes == [0, 0]
    assert notes["work"]["folder"] == str(tmp_path / "run")
    assert notes["work"]["towards"] == [None, None]
    assert notes["begin"] == 0
    assert "failed" not in notes


def test_a_rank_that_failed_elsewhere_is_in_the_outcome(run_rank_0, tmp_path):
    late = [LateRank(1, "step", 9, 12.0, 10.0)]
    failed = note(1, "step", late=late, errors={1: "ValueError"})
    outcome, _ = run_rank_0(ended_with(None), failed, status=None)
    assert outcome.status == "failed"
    assert outcome.exits.codes == [None, 1]
    assert outcome.exits.errors == {1: "ValueError"}
    assert [late.rank for late in outcome.exits.late] == [1]
    assert (tmp_path / "run" / "failures.jsonl").read_text().count("attempt 0 failed") == 1


def test_a_rank_that_never_reports_is_unknown(run_rank_0):
    outcome, notes = run_rank_0(exits(1), None, status=None)
    assert outcome.exits.unknown == (1,)
    assert notes["failed"] is True


@pytest.mark.parametrize("own", [ended_with(128 + signal.SIGTERM), exits(0)])
def test_a_signal_to_any_launched_process_interrupts_the_run(run_rank_0, own):
    outcome, _ = run_rank_0(own, note(128 + signal.SIGTERM))
    assert (outcome.status, outcome.signal) == ("interrupted", signal.SIGTERM)


def test_the_other_ranks_exit_with_the_code_of_a_usage_error(run_rank_0, monkeypatch):
    def prepare(job, places):
        raise UsageError("wrong")

    store = FakeStore(facts_0={**FACTS, "rank": 0}, facts_1={**FACTS, "rank": 1})
    job, _ = make_job(None)
    with pytest.raises(UsageError):
        lead(team(store), replace(job, prepare=prepare))
    assert store.notes["work"] == {"code": 2}


def test_a_node_that_does_not_see_the_run_folder_is_named(run_rank_0, tmp_path):
    facts = {"facts_0": {**FACTS, "rank": 0}, "facts_1": {**FACTS, "rank": 1, "name": "n2"}}
    facts["facts_1"] |= {"node": 1, "machine": "B"}
    store = FakeStore(**facts, sees_1=False)
    job, _ = make_job(tmp_path / "run")
    with pytest.raises(UsageError, match="n2"):
        lead(team(store), job)
    assert store.notes["begin"] == 2


@pytest.mark.parametrize(
    ("own", "code"),
    [
        (exits(0), 0),
        (exits(1), 1),
        (exits(-9), 1),  # an exit code cannot be negative
        (ended_with(None), 1),  # it was ended because another rank failed
        (ended_with(143), 143),
    ],
)
def test_another_rank_follows_and_reports(tmp_path, monkeypatch, clock, own, code):
    monkeypatch.setattr(Team, "run_rank", lambda *arguments: own)
    monkeypatch.setattr(joined_ranks.signal, "signal", lambda *arguments: None)
    (tmp_path / "manifest.json").touch()
    work = {"code": 0, "folder": str(tmp_path), "jobs": [{"checkpoints": None}]}
    store = FakeStore(work=work, begin=0, reported=True)
    with pytest.raises(SystemExit) as left:
        follow(team(store, rank=1))
    assert left.value.code == code
    assert store.notes["sees/1"] is True
    assert ("failed" in store.notes) == (code != 0)
    assert "ended/1" in store.notes


@pytest.mark.parametrize("code", [2, 0])  # a usage error; all steps are already done
def test_another_rank_exits_with_rank_0s_code(monkeypatch, clock, code):
    monkeypatch.setattr(joined_ranks.signal, "signal", lambda *arguments: None)
    store = FakeStore(work={"code": code}, reported=True)
    with pytest.raises(SystemExit) as left:
        follow(team(store, rank=1))
    assert left.value.code == code


class Board:
    """One launched process's status board; its rank runs steps until it must stop."""

    def __init__(self, step):
        self.step, self.waiting, self.stop_at, self.agreed = step, False, NEVER, False

    def read(self, rank):
        return self

    def stop(self, before, agreed):
        self.stop_at, self.agreed = before, agreed

    def run_step(self):
        """Finish a step, unless the rank waits. It waits as soon as it reaches the stop."""
        self.waiting = self.stop_at != NEVER and self.step >= self.stop_at
        if not self.waiting:
            self.step += 1
            self.waiting = self.step == self.stop_at


@pytest.fixture
def poll(clock):
    """Poll as a process whose rank runs, with this store."""

    def poll(store):
        stop = StopTogether(replace(PLACE, rank=1), store, StopRequest(lambda line: None))
        return lambda: stop.poll(Board(7))

    return poll


def test_a_failure_elsewhere_ends_this_rank_after_a_moment(poll, clock):
    store = FakeStore()
    check = poll(store)
    for _ in range(20):
        check()
        clock.now += 1
    store.put("failed", True)
    check()  # notices it
    clock.now += 2
    check()  # this rank may notice it itself
    clock.now += 2
    with pytest.raises(OtherFailed):
        check()


def test_a_store_that_is_gone_is_a_failure_of_rank_0(poll, clock):
    store = FakeStore()
    store.gone = True
    check = poll(store)
    check()
    clock.now += 4
    with pytest.raises(OtherFailed):
        check()


def test_ranks_of_two_processes_stop_before_the_same_step(clock):
    store, boards = FakeStore(), [Board(7), Board(8)]
    requests = [StopRequest(lambda line: None) for _ in boards]
    stops = [
        StopTogether(replace(PLACE, rank=rank), store, request)
        for rank, request in enumerate(requests)
    ]
    requests[1].signal = signal.SIGTERM  # only rank 1's process got a signal
    for _ in range(20):
        for stop, board in zip(stops, boards, strict=True):
            stop.poll(board)
            board.run_step()
            clock.now += 0.1
    assert all(board.agreed and board.waiting for board in boards)
    assert boards[0].step == boards[1].step
