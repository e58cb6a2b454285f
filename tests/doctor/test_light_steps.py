"""Light steps: what they may cost, and what the doctor still sees in them. The mistakes here begin
late, in light steps."""

import json
import textwrap

import pytest

from paralab.doctor.events import Backward, Batch, Collective, Cost, Step, ZeroGrad
from paralab.doctor.observation import Observation, Reader
from paralab.observe.budget import Budget, affordable
from paralab.record.operations import OPEN, ROWS, RingLog, read_ring_log
from tests.doctor import ranks
from tests.doctor.ranks import waited_in
from tests.doctor.test_hangs import HEAD, TAIL

MILLI = 1_000_000  # nanoseconds


def test_how_rarely_a_step_is_watched():
    #                 plain digests step one in
    assert affordable(0.05,   0.05,  10.0,  8) == 8  # fmt: skip
    assert affordable(0.40,   0.50,  10.0,  8) == 16  # fmt: skip
    assert affordable(0.40,   3.00,  10.0,  8) == 128  # fmt: skip
    assert affordable(0.40,   3.00, 200.0,  8) == 8  # fmt: skip
    assert affordable(0.40,   3.00, 200.0, 64) == 64  # fmt: skip
    assert affordable(9.00,   9.00,   0.1,  8) == 1024, "never none at all"  # fmt: skip


def run_steps(steps, step_ms, watched_ms, light_ms, digests_ms=0.0, new_in=()):
    """Return the watched steps, and the budget after them, for these step times."""
    now = [0]
    budget = Budget(lambda: now[0])
    watched = []
    for step in range(1, steps + 1):
        own = watched_ms + digests_ms * (step % 64 == 0) if budget.watched else light_ms
        if budget.watched:
            watched.append(step)
        if step in new_in:
            budget.something_new(step - 1)
        budget.spent += int(own * MILLI)
        now[0] += int((step_ms + own) * MILLI)
        if step >= budget.until:
            budget.step_is_over(step)
    return watched, budget


@pytest.mark.parametrize(
    ("step_ms", "digests_ms"), [(2.0, 0.5), (5.0, 3.0), (40.0, 60.0), (100.0, 3.0)]
)
def test_what_is_sampled_stays_within_its_share(step_ms, digests_ms):
    watched, budget = run_steps(8192, step_ms, 0.4, 0.0, digests_ms)
    assert watched[:64] == list(range(1, 65))
    late = [step for step in watched if step > 1024]
    cost = 0.4 * len(late) + digests_ms * sum(step % 64 == 0 for step in late)
    assert 0 < cost <= 0.0052 * step_ms * (8192 - 1024)
    assert {step % budget.every for step in late[-3:]} == {0}
    assert 0 < budget.share < 0.02 + 0.4 * 64 / (step_ms * 8192)


def test_a_step_that_brings_something_new_is_followed_by_a_watched_one():
    watched, _ = run_steps(200, 50.0, 0.1, 0.01, new_in=[101, 110, 111, 112])
    assert [step for step in watched if 96 < step <= 128] == [102, 104, 111, 112, 120, 128], (
        "but not all, where all is new"
    )


def test_rows_come_back_and_the_open_one_is_known(tmp_path):
    recent = RingLog(tmp_path / "rank0.recent")
    for number in range(1, ROWS + 11):
        row = recent.begin(number % 7, 100.0 + number, 5, number, OPEN)
        if number < ROWS + 10:
            recent.end(row, 0.5)
    rows = read_ring_log(tmp_path / "rank0.recent")
    assert [row.number for row in rows] == list(range(11, ROWS + 11))
    assert [row.seconds for row in rows] == [0.5] * (ROWS - 1) + [OPEN]
    assert (rows[0].first, rows[-1].call) == (11, (ROWS + 10) % 7)
    recent.end(1, 9.0)
    assert all(row.seconds != 9.0 for row in read_ring_log(tmp_path / "rank0.recent")), (
        "its place was taken"
    )


def test_only_steps_that_all_ranks_watched_are_judged(tmp_path):
    """Rank 1 could afford fewer watched steps. Rank 0's additional ones count as recent
    operations, not as events."""
    for rank, kept in ((0, (1, 2, 8, 16)), (1, (1, 2, 16))):
        events = [{"event": "start", "t": 0.0, "step": 0, "rank": rank, "world": 2}]
        for step in kept:
            events.append({"event": "backward", "t": step, "step": step - 1, "seq": [step, step]})
            events.append({"event": "step", "t": step + 0.5, "step": step, "number": step})
        lines = [json.dumps(event) for event in events]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    zero, one = Observation.read(tmp_path).ranks
    assert (
        [step.number for step in zero.of(Step)]
        == [step.number for step in one.of(Step)]
        == [1, 2, 16]
    )
    assert [b.seq[0] for b in zero.of(Backward)] == [1, 2, 16]
    assert [e.number for e in zero.story if isinstance(e, Step)] == [1, 2, 8, 16]
    (tmp_path / "rank1.jsonl").write_text("\n".join(lines[:5]) + "\n")
    ahead = Reader(tmp_path).read(over=False).ranks[0]
    assert [step.number for step in ahead.of(Step)] == [1, 2, 8, 16], "rank 1 has not come to those"


BODY = """
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    data = TensorDataset(torch.randn(1600, 2, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step, (row,) in enumerate(loader, 1):
        optimizer.zero_grad()
        model(row).square().mean().backward()
        optimizer.step()
        LATE
"""


def observed(tmp_path, late):
    script = tmp_path / "train.py"
    body = textwrap.dedent(BODY).replace(
        "    LATE\n", textwrap.indent(textwrap.dedent(late).lstrip("\n"), "    ")
    )
    script.write_text(HEAD + body + TAIL)
    seen = ranks.observed(script, folder=tmp_path / "seen")
    return (
        seen,
        [finding for finding in seen.findings if finding.severity == "error"],
        script.read_text().splitlines(),
    )


def line(finding, text):
    return text[finding.line - 1].strip()


@pytest.mark.processes
def test_a_hang_deep_in_the_run_is_named_with_the_lines_of_both_sides(tmp_path):
    _, errors, text = observed(
        tmp_path,
        """
        if step == 203 and rank == 1:
            dist.barrier()
        """,
    )
    (finding,) = errors
    assert (finding.id, finding.rank, line(finding, text)) == ("H03", 1, "dist.barrier()")
    assert "barrier" in finding.why
    backward = 1 + next(number for number, each in enumerate(text) if ".backward()" in each)
    assert f"train.py:{backward}" in " ".join(finding.evidence), "where the other one is"
    zero, one = Observation.read(tmp_path / "seen").ranks
    assert isinstance(waited_in(zero), Backward)
    assert isinstance(waited_in(one), Collective)
    assert waited_in(one).step == one.made == 203
    assert not any(event.step == 203 for event in one.of(Backward)), "it was a light step"
    assert [event.batch for event in one.story if isinstance(event, Batch)][-1] == 203


@pytest.mark.processes
def test_ranks_that_part_late_are_found_by_the_numbers_of_batches(tmp_path):
    _, errors, _ = observed(
        tmp_path,
        """
        if rank == 1 and step > 300:
            break
        """,
    )
    (finding,) = errors
    assert (finding.id, finding.rank) in (("H02", 1), ("H08", 1))
    assert "after batch 301" in finding.why
    assert "continued to batch 302" in finding.why


@pytest.mark.processes
def test_an_exception_in_a_light_step(tmp_path):
    _, errors, text = observed(
        tmp_path,
        """
        if step == 205 and rank == 0:
            raise KeyError("label")
        """,
    )
    (finding,) = errors
    assert (finding.id, finding.rank, line(finding, text)) == ("H11", 0, 'raise KeyError("label")')
    assert any("backward" in each and "failed" in each for each in finding.evidence), (
        finding.evidence
    )


@pytest.mark.processes
def test_a_mistake_that_begins_late_is_found_and_the_cost_is_told(tmp_path):
    """From step 200 on, the ranks' parameters drift apart. Light steps keep no events, and watched
    steps keep all."""
    seen, errors, _ = observed(
        tmp_path,
        """
        if step >= 200:
            with torch.no_grad():
                model.module.weight.add_(0.01 * (rank + 1))
        """,
    )
    assert seen.exit_code == 0
    assert [(finding.id, finding.severity) for finding in errors] == [("S08", "error")], (
        seen.findings
    )
    one = Observation.read(tmp_path / "seen").ranks[1]
    assert len(one.of(ZeroGrad)) == len(one.of(Step)) == len(one.of(Backward)) < 200
    costs = one.of(Cost)
    assert len(costs) == 400 // 64
    assert 0 < costs[-1].share < costs[0].share < 1
    assert seen.cost == max(
        rank.last(Cost).share for rank in Observation.read(tmp_path / "seen").ranks
    )
