"""The symbolic run: meaning, not spelling. Every test is a few lines of a script and what must be
known about them."""

import gc
import textwrap
import weakref

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.script import questions
from paralab.doctor.script.naming import DDP, SCALER
from paralab.doctor.script.reading import read_script
from paralab.doctor.script.values import Loop, With
from paralab.errors import UsageError
from tests.doctor.cases import CORPUS


@pytest.fixture
def read(tmp_path):
    def read(main, **modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        (tmp_path / "train.py").write_text(textwrap.dedent(main))
        return read_script(tmp_path / "train.py")

    return read


@pytest.mark.parametrize(
    "wrapping",
    [
        "from torch.nn.parallel import DistributedDataParallel as Wrapped\nmodel = Wrapped(net)",
        "import torch.nn as n\nmodel = n.parallel.DistributedDataParallel(net)",
        "import torch\nW = torch.nn.parallel.distributed.DistributedDataParallel\nmodel = W(net)",
        "from torch.nn.parallel import DistributedDataParallel as D\ndef w(m):\n    return D(m) if many else m\nmodel = w(net)",
        "from torch.nn.parallel import DistributedDataParallel\nmodel = net\nif many:\n    model = DistributedDataParallel(model)",
        "import torch\nmodel = torch.compile(torch.nn.parallel.DistributedDataParallel(net).cuda())",
        "from setup_ddp import wrapped\nmodel = wrapped(net)",
    ],
)
def test_a_wrapped_model_is_known_whatever_it_is_called(read, wrapping):
    script = read(
        f"{wrapping}\nout = model(batch)\nout.sum().backward()\n",
        setup_ddp="from torch.nn.parallel import DistributedDataParallel as D\ndef wrapped(m):\n    return D(m)\n",
    )
    (backward,) = script.methods("backward")
    (forward,) = [
        call for call in questions.sources(backward.receiver) if questions.is_forward(call)
    ]
    assert forward.target == f"{DDP}.__call__"
    assert "ddp" in questions.roles(forward.receiver)


@pytest.mark.parametrize(
    ("test", "who"),
    [
        ("dist.get_rank() == 0", "rank 0 only"),
        ("not dist.get_rank()", "rank 0 only"),
        ("int(os.environ['RANK']) != 0", "all ranks but 0"),
        ("int(os.environ.get('LOCAL_RANK', 0)) < 1", "rank 0 only"),
        ("is_main()", "rank 0 only"),
        ("not is_main()", "all ranks but 0"),
        ("dist.is_initialized() and dist.get_rank() > 0", "all ranks but 0"),
        ("args.local_rank in (-1, 0)", "rank 0 only"),
        ("dist.get_rank() % 2 == 0", "only some ranks"),
        ("dist.get_world_size() > 1", None),
        ("torch.device(dist.get_rank()).type == 'cuda'", None),
        ("epoch % 5 == 0", None),
    ],
)
def test_who_takes_a_branch(read, test, who):
    script = read(
        f"""
        import argparse, os, torch
        import torch.distributed as dist
        args = argparse.ArgumentParser().parse_args()
        def is_main():
            if not dist.is_initialized():
                return True
            return dist.get_rank() == 0
        for epoch in range(3):
            if {test}:
                dist.barrier()
        """
    )
    (barrier,) = script.calls_of("torch.distributed.barrier")
    branch = questions.rank_branch(barrier)
    assert (questions.who_takes(branch) if branch else None) == who


def test_what_follows_a_guard_stands_in_the_other_branch(read):
    script = read(
        """
        import torch.distributed as td
        def save(rank):
            if rank != 0:
                return
            td.barrier()
        save(td.get_rank())
        td.barrier()
        """
    )
    inside, outside = script.calls_of("torch.distributed.barrier")
    assert questions.who_takes(questions.rank_branch(inside)) == "rank 0 only"
    assert questions.rank_branch(outside) is None


def test_contexts_follow_functions_classes_and_modules(read):
    script = read(
        """
        import torch
        from engine import Trainer
        loader = torch.utils.data.DataLoader(data)
        Trainer(torch.nn.parallel.DistributedDataParallel(net), loader).fit(3)
        """,
        engine="""
        import contextlib
        class Trainer:
            def __init__(self, model, loader):
                self.model, self.loader = model, loader
            def fit(self, epochs):
                for epoch in range(epochs):
                    self.epoch(epoch)
            def epoch(self, number):
                for step, (x, y) in enumerate(self.loader):
                    with self.quiet(step):
                        self.model(x).sum().backward()
            @contextlib.contextmanager
            def quiet(self, step):
                if step % 4:
                    with self.model.no_sync():
                        yield
                else:
                    yield
        """,
    )
    (backward,) = script.methods("backward")
    assert questions.loop_over(backward, "loader") is not None
    assert (
        len(list(backward.inside(Loop))) == 2
    )  # the epochs too, though they are in another function
    assert questions.under(backward, "no_sync") is not None
    assert backward.file.name == "engine.py"


@pytest.mark.parametrize(
    "entering",
    [
        "with model.no_sync():",
        "with ExitStack() as stack:\n        stack.enter_context(model.no_sync())",
        "with (nullcontext() if i % 2 else model.no_sync()):",
    ],
)
def test_no_sync_is_seen_however_it_is_entered(read, entering):
    script = read(
        f"""
from contextlib import ExitStack, nullcontext
import torch
model = torch.nn.parallel.DistributedDataParallel(net)
for i, x in enumerate(torch.utils.data.DataLoader(data)):
    {entering}
        model(x).sum().backward()
    model(x)
"""
    )
    inside, outside = script.calls_of(f"{DDP}.__call__")
    assert questions.under(inside, "no_sync")
    assert not questions.under(outside, "no_sync")


def test_a_loss_knows_how_it_was_scaled(read):
    script = read(
        """
        import torch
        scaler = torch.cuda.amp.GradScaler()
        model = torch.nn.Linear(2, 2)
        steps = 4
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss = loss / steps
        scaler.scale(loss).backward()
        """
    )
    (backward,) = script.methods("backward")
    (scale,) = script.calls_of(f"{SCALER}.scale")
    assert scale.written == f"{SCALER}.scale"
    assert backward.receiver is scale.result
    division = next(
        origin
        for origin in questions.origins(backward.receiver)
        if getattr(origin, "op", "") == "Div"
    )
    assert questions.number(division.parents[1]) == 4


def test_a_number_that_a_loop_changes_is_not_known(read):
    script = read("count = 0\nfor x in data:\n    use(count)\n    count += 1\nuse(7)\n")
    varying, fixed = (call for call in script.calls if call.node.func.id == "use")
    assert questions.number(varying.args[0]) is None
    assert questions.number(fixed.args[0]) == 7


def test_functions_that_nothing_calls_are_read_too(read):
    script = read(
        """
        import torch.distributed as dist
        class Job:
            def run(self):
                if self.rank == 0:
                    dist.barrier()
            def __init__(self, rank):
                self.rank = rank
        """
    )
    (barrier,) = script.calls_of("torch.distributed.barrier")
    assert questions.rank_branch(barrier)


def test_spawned_functions_get_a_rank(read):
    script = read(
        """
        import torch.multiprocessing as mp, torch.distributed as dist
        def work(which, world):
            if which == 0:
                dist.barrier()
        mp.spawn(work, args=(2,), nprocs=2)
        """
    )
    (barrier,) = script.calls_of("torch.distributed.barrier")
    assert questions.who_takes(questions.rank_branch(barrier)) == "rank 0 only"


def test_decorators_count_as_with_blocks(read):
    script = read(
        "import torch\n@torch.no_grad()\ndef validate(model):\n    model(1)\nvalidate(torch.nn.Linear(1, 1))\n"
    )
    (forward,) = [call for call in script.calls if questions.is_forward(call)]
    assert questions.under(forward, "no_grad")
    assert next(forward.inside(With))


def test_scripts_that_go_round_in_circles_end(read):
    script = read(
        "def f(n):\n    return g(n)\ndef g(n):\n    return f(n) + f(n + 1)\nf(0)\nwhile True:\n    f(1)\n"
    )
    assert len(script.happened) < 200


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\x00"])
def test_what_is_not_python_is_a_wrong_use(read, text):
    with pytest.raises(UsageError, match="is not Python"):
        read(text)


def test_a_script_that_was_read_and_judged_is_let_go(tmp_path):
    """Answers are kept with what was asked about: caches of whole modules held every script of a
    large tree."""
    path = tmp_path / "train.py"
    path.write_text((CORPUS / "H03" / "broken.py").read_text())
    script = read_script(path)
    assert apply("script", script)
    gone = weakref.ref(script), weakref.ref(script.happened[-1])
    del script
    gc.collect()
    assert [each() for each in gone] == [None, None]
