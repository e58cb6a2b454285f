"""Scripts that look like a hang but are not, and hangs that are not in the corpus, in a few lines
each."""

import os
import signal
import textwrap
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from paralab.doctor.events import Backward, Forward, Start, Step, ZeroGrad
from paralab.doctor.failures.hangs.hung_ranks import IDS
from paralab.doctor.observation import Observation, Reader, WatchedRank
from paralab.doctor.place import Place, Site
from paralab.doctor.registry import Finding
from paralab.doctor.source_context import Condition, conditions, opposite, ways_out_of_loops
from paralab.doctor.watch import Watch
from tests.doctor import ranks
from tests.doctor.ranks import waited_in

pytestmark = pytest.mark.processes

HEAD = """
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(rank)
"""
HANGS = {*IDS, "H05"}
TAIL = "\ndist.destroy_process_group()\n"


def run(tmp_path, body, **more):
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(body) + TAIL)
    return ranks.observed(script, folder=tmp_path / "seen", **more)


HEALTHY = {
    "the two sides of an if hold one broadcast": """
        for step in range(3):
            value = torch.zeros(2)
            if rank == step % 2:
                dist.broadcast(value + 1, src=step % 2)
            else:
                dist.broadcast(value, src=step % 2)
    """,
    "a rank without data reduces a zero in its place": """
        for step in range(4):
            if (step + rank) % 2:
                dist.all_reduce(torch.ones(1))
            else:
                dist.all_reduce(torch.zeros(1))
    """,
    "unequal numbers of batches inside join": """
        from torch.utils.data import DataLoader, TensorDataset
        model = DDP(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for (row,) in DataLoader(TensorDataset(torch.randn(8 + 4 * rank, 2)), batch_size=4):
                optimizer.zero_grad()
                model(row).sum().backward()
                optimizer.step()
    """,
    "one rank validates with the module inside": """
        model = DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        for epoch in range(2):
            model(torch.randn(4, 2)).sum().backward()
            if rank == 0:
                model.module.eval()
                model.module(torch.randn(4, 2))
                model.module.train()
    """,
    "a message that comes late, around a ring": """
        tensor = torch.ones(2)
        for step in range(2):
            if rank == 0:
                time.sleep(1.5)
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, src=0)
                dist.send(tensor, dst=0)
            dist.broadcast(tensor, *([step] if rank else []), **({} if rank else {"group_src": step}))
    """,
    "a rank that takes long comes in the end": """
        model = DDP(nn.Linear(2, 1))
        for step in range(2):
            if rank == 1:
                time.sleep(1.5)
            model(torch.randn(4, 2)).sum().backward()
    """,
    "all ranks leave early, together": """
        from torch.utils.data import DataLoader, TensorDataset
        model = DDP(nn.Linear(2, 1))
        for epoch in range(2):
            for number, (row,) in enumerate(DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=4)):
                loss = model(row).square().mean()
                loss.backward()
                stop = torch.tensor(float(number == 2))
                dist.all_reduce(stop, op=dist.ReduceOp.MAX)
                if stop.item():
                    break
    """,
    "an exception that the script expects": """
        try:
            if rank == 0:
                raise ValueError("no such file")
        except ValueError:
            pass
        dist.barrier()
    """,
}


@pytest.mark.parametrize("body", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_script_is_not_accused(body, tmp_path):
    seen = run(tmp_path, body)
    assert seen.exit_code == 0, seen
    assert not [
        finding
        for finding in seen.findings
        if finding.severity == "error" or finding.id in HANGS - {"H13"}
    ]


def test_a_loop_without_a_loader_is_left_early(tmp_path):
    seen = run(
        tmp_path,
        """
        model = DDP(nn.Linear(2, 1))
        def train():
            for step in range(6):
                loss = model(torch.randn(4, 2)).square().mean()
                loss.backward()
                if loss.item() * 0 + rank * step > 2:
                    break
        train()
        """,
    )
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) in (("H08", 1), ("H02", 1))
    assert Path(finding.file).read_text().splitlines()[finding.line - 1].strip() == "break"


def test_the_rank_that_left_first_is_named(tmp_path):
    """Rank 2 leaves the first pass, and its next pass pairs with the others' first one. Then the
    others leave, too, and every one of them fails."""
    seen = run(
        tmp_path,
        """
        from torch.utils.data import DataLoader, TensorDataset
        model = DDP(nn.Linear(2, 1))
        loader = DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=4)
        for epoch in range(2):
            for number, (row,) in enumerate(loader):
                model(row).square().mean().backward()
                if number == (6, 4, 2)[rank]:
                    break
        """,
        count=3,
    )
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) == ("H02", 2)
    assert "after batch 3 of pass 1" in finding.why


@pytest.mark.parametrize("leave", ["raise SystemExit", "raise SystemExit(3)", "quit()"])
def test_a_rank_that_exits_is_named_and_not_the_one_that_fails_then(leave, tmp_path):
    """Rank 0 notices that rank 2 is gone, and exits as well."""
    seen = run(
        tmp_path,
        f"""
        import sys
        def train():
            for step in range(4):
                try:
                    dist.all_reduce(torch.ones(1))
                except RuntimeError:
                    sys.exit(1)
                if step == rank == 2:
                    {leave}
        train()
        """,
        count=3,
    )
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) == ("H02", 2)
    line = Path(finding.file).read_text().splitlines()[finding.line - 1]
    assert line.strip() == leave


@pytest.mark.parametrize("leave", ["sys.exit(0)", "raise SystemExit"])
def test_a_spawned_rank_exits_where_the_script_says_so(leave, tmp_path):
    """multiprocessing then calls os._exit."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            import torch, torch.distributed as dist, torch.multiprocessing as mp

            def work(rank, meeting):
                dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
                for step in range(4):
                    dist.all_reduce(torch.ones(1))
                    if step == 2 and rank == 1:
                        {leave}

            mp.spawn(work, args=("file://{tmp_path}/meeting",), nprocs=2)
            """
        )
    )
    seen = ranks.observed(script, folder=tmp_path / "seen", count=0)
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) == ("H02", 1)
    line = Path(finding.file).read_text().splitlines()[finding.line - 1]
    assert line.strip() == leave


def test_a_hang_has_one_reason_until_the_ranks_start_again(tmp_path):
    first = Finding("H08", "error", "left", "", "train.py", 32, rank=1)
    later = Finding("H08", "error", "left too", "", "train.py", 32, rank=0)
    other = Finding("T01", "error", "all data", "", "train.py", 9)
    said = []
    watched = Watch(None, None, 1.0, said.append, ends=True)
    start = Start(t=time.time())
    rank = WatchedRank(0, start, (), (), True, "S", 1)
    seen = Observation(tmp_path, [rank], 1)
    assert watched.without_consequences([later], seen) == [later]
    watched.report(other)
    watched.report(first)
    assert watched.without_consequences([first, later, other], seen) == [first, other]
    restarted = replace(seen, ranks=[replace(rank, start=Start(t=time.time() + 1))])
    assert watched.without_consequences([later], restarted) == [later]
    assert said == [other, first]


def test_a_broadcast_in_both_branches_is_not_blamed_for_a_later_hang(tmp_path):
    seen = run(
        tmp_path,
        """
        value = torch.zeros(2)
        if rank == 0:
            dist.broadcast(value + 1, src=0)
        else:
            dist.broadcast(value, src=0)
        for step in range(3):
            dist.all_reduce(value)
        if rank == 1:
            dist.barrier()
        """,
    )
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) == ("H03", 1)
    line = Path(finding.file).read_text().splitlines()[finding.line - 1]
    assert line.strip() == "dist.barrier()"


def test_two_groups_in_another_order(tmp_path):
    """Each rank waits in a group in which the other is missing."""
    seen = run(
        tmp_path,
        """
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)
        """,
    )
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert finding.id == "H04"
    assert "in different groups" in finding.why


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        # The doctor did not report anything.
        ("dist.recv(torch.ones(4), src=1 - rank)", "recv from rank 1", "recv from rank 0"),
        (
            "dist.recv(torch.ones(4), src=1) if rank == 0 else dist.barrier()",
            "recv from rank 1",
            "barrier",
        ),
        # It suspected the network.
        (
            "dist.broadcast(torch.ones(3), src=rank)",
            "broadcast from rank 0",
            "broadcast from rank 1",
        ),
    ],
    ids=["two receive", "one receives and one is in a barrier", "two roots"],
)
def test_the_rank_at_the_other_end_counts(body, first, second, tmp_path):
    seen = run(tmp_path, f"dist.all_reduce(torch.ones(1))\n{body}")
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert finding.id == "H04"
    assert first in finding.why
    assert second in finding.why
    assert not [other for other in seen.findings if other.id in HANGS - {"H04"}]


def test_a_stopped_rank_is_named_and_not_its_victim(tmp_path):
    """One rank is stopped from outside, as by Ctrl-Z or a debugger, and the other one waits."""
    folder = tmp_path / "seen"

    def stop():
        reader = Reader(folder)
        for _ in range(400):
            seen = reader.read(over=False)
            if (one := seen.rank(1)) and one.collectives.get("0"):
                os.kill(one.start.pid, signal.SIGSTOP)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=stop)
    thread.start()
    seen = run(
        tmp_path,
        """
        for step in range(400):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.02)
        """,
    )
    thread.join()
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) == ("H10", 1)
    assert "stopped" in finding.why


def test_a_long_run_keeps_whole_steps_and_a_late_hang_is_still_named(tmp_path):
    """After 1,100 steps, of which few are kept, only one rank calls a collective."""
    seen = run(
        tmp_path,
        """
        model = DDP(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for step in range(1200):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            if step == 1099 and rank == 1:
                dist.barrier()
        """,
    )
    (finding,) = [finding for finding in seen.findings if finding.severity == "error"]
    assert (finding.id, finding.rank) == ("H03", 1)
    observation = Observation.read(tmp_path / "seen")
    one = observation.ranks[1]
    assert one.made == 1100
    assert waited_in(one).step == 1100
    numbers = [step.number for step in one.of(Step)]
    assert numbers[:64] == list(range(1, 65))
    assert 64 + 1 <= len(numbers) < 200
    assert all(number % 8 == 0 for number in numbers[64:])
    assert next(step for step in one.steps if step.number == 1024).gradients, (
        "however dear, with digests"
    )
    assert [step.number for step in observation.ranks[0].of(Step)] == numbers, (
        "the same on all ranks"
    )
    for before, step in pairwise(one.of(Step)):
        between = [
            type(event)
            for event in one.events
            if before.t < event.t < step.t and event.step == step.step - 1
        ]
        assert [kind for kind in between if kind in (ZeroGrad, Forward, Backward)] == [
            ZeroGrad,
            Forward,
            Backward,
        ], step.number


@pytest.mark.parametrize(
    ("test", "is_about_the_rank"),
    [
        ("dist.get_rank() == 0", True),
        ("self.local_rank in (-1, 0)", True),
        ("os.environ['RANK'] == '0'", True),
        ("accelerator.is_main_process", True),
        ("trainer.is_global_zero", True),
        ("not master", True),
        ("remaining < 0", False),
        ("first_batch", False),
        ("domain == 'main'", False),
        ("__name__ == '__main__'", False),
    ],
)
def test_a_condition_about_the_rank_is_known_by_its_words(test, is_about_the_rank):
    """A word that only contains one of them (`remain`) once matched."""
    assert Condition("train.py", 1, test, "body").is_about_the_rank == is_about_the_rank


def test_lines_are_read_as_they_are_nested(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        textwrap.dedent(
            """
            def train(loader):
                for epoch in range(3):
                    for batch in loader:
                        step(batch)
                        if bad(batch):
                            continue
                    if good():
                        break
                if rank == 0:
                    report()
                else:
                    wait()
            """
        )
    )

    def at(text):
        line = next(
            number for number, each in enumerate(file.read_text().splitlines(), 1) if text in each
        )
        return Place(str(file), line, "train")

    assert [(c.test, c.side) for c in conditions(at("report()"))] == [("rank == 0", "body")]
    assert opposite(Site((at("report()"),)), Site((at("wait()"),)))
    assert not opposite(Site((at("report()"),)), Site((at("step("),)))
    loop = at("for batch").line
    assert [
        way.kind for way in ways_out_of_loops(Site((at("step("),)), loop, only_around=True)
    ] == ["break"]
    assert (
        ways_out_of_loops(Site((at("step("),)), loop, only_around=False)[0].condition.test
        == "good()"
    )
