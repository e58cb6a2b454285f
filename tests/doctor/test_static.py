"""Facts about a script: the meaning of names, the results of tests on each rank, and contexts."""

import ast
import gc
import textwrap
import weakref

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.failures.hangs.sequences import differences_of
from paralab.doctor.static.facts import If, Loop
from paralab.doctor.static.names import DDP, SCALER
from paralab.doctor.static.script import Script
from paralab.errors import UsageError
from tests.doctor.cases import CORPUS

BARRIER = "torch.distributed.barrier"


@pytest.fixture
def read(tmp_path):
    def read(main, **modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        (tmp_path / "train.py").write_text(textwrap.dedent(main))
        return Script(tmp_path / "train.py")

    return read


@pytest.mark.parametrize(
    "wrapping",
    [
        "from torch.nn.parallel import DistributedDataParallel as Wrapped\nmodel = Wrapped(net)",
        "import torch.nn as n\nmodel = n.parallel.DistributedDataParallel(net)",
        "import torch\nW = torch.nn.parallel.distributed.DistributedDataParallel\nmodel = W(net)",
        "from torch.nn.parallel import DistributedDataParallel as D\n"
        "def w(m):\n    return D(m) if many else m\nmodel = w(net)",
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = net\nif many:\n    model = DistributedDataParallel(model)",
        "import torch\n"
        "model = torch.compile(torch.nn.parallel.DistributedDataParallel(net).cuda())",
        "from setup_ddp import wrapped\nmodel = wrapped(net)",
        "import setup_ddp\nmodel = setup_ddp.wrapped(net)",
    ],
)
def test_a_wrapped_model_is_known_by_any_name(read, wrapping):
    script = read(
        f"{wrapping}\nout = model(batch)\nout.sum().backward()\n",
        setup_ddp="from torch.nn.parallel import DistributedDataParallel as D\n"
        "def wrapped(m):\n    return D(m)\n",
    )
    assert len(script.calls_of(DDP)) == 1
    (forward,) = [call for call in script.methods("model") if call.node.args]
    assert script.is_kind(forward.node.func, forward.scope, "ddp")
    assert script.is_kind(forward.node, forward.scope, "output")


@pytest.mark.parametrize(
    ("test", "truths"),
    [
        ("dist.get_rank() == 0", [True, False]),
        ("not dist.get_rank()", [True, False]),
        ("int(os.environ['RANK']) != 0", [False, True]),
        ("os.environ['RANK'] == '0'", [True, False]),
        ("int(os.environ.get('LOCAL_RANK', 0)) < 1", [True, False]),
        ("is_main()", [True, False]),
        ("not is_main()", [False, True]),
        ("dist.is_initialized() and dist.get_rank() > 0", [False, True]),
        ("args.local_rank in (-1, 0)", [True, False]),
        ("accelerator.is_main_process", [True, False]),
        ("unknown_helper.is_master()", [True, False]),
        ("dist.get_world_size() > 1", [True, True]),
        ("'RANK' in os.environ", [True, True]),
        ("args.distributed", [True, True]),
        ("dist.get_rank() == 0 and epoch % 5 == 0", [None, False]),
        ("epoch % 5 == 0", [None, None]),
        ("os.path.exists('data')", [None, None]),
    ],
)
def test_what_a_test_decides_on_each_rank(read, test, truths):
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
    (barrier,) = script.calls_of(BARRIER)
    (way,) = barrier.inside(If)
    assert [script.truth(way.test, barrier.scope, rank) for rank in (0, 1)] == truths


@pytest.mark.parametrize(
    ("value", "nature"),
    [
        ("epoch", "same"),
        ("step % 10", "same"),
        ("args.limit", "same"),
        ("dist.get_world_size()", "same"),
        ("len(loader)", "same"),
        ("dist.get_rank()", "rank"),
        ("loss.item()", "local"),
        ("float(loss) * 2", "local"),
        ("reduced.item()", "same"),
        ("mean(loss)", "same"),
        ("elsewhere.decide(loss)", "unknown"),
    ],
)
def test_whether_ranks_agree_on_a_value(read, value, nature):
    script = read(
        f"""
        import argparse
        import elsewhere
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler
        args = argparse.ArgumentParser().parse_args()
        loader = DataLoader(data, sampler=DistributedSampler(data))
        model = DistributedDataParallel(nn.Linear(2, 2))
        def mean(x):
            dist.all_reduce(x)
            return x / dist.get_world_size()
        for epoch in range(3):
            for step, (x, y) in enumerate(loader):
                loss = nn.functional.mse_loss(model(x), y)
                reduced = loss.clone()
                dist.all_reduce(reduced)
                print({value})
        """
    )
    (printed,) = script.methods("print")
    assert script.nature(printed.node.args[0], printed.scope) == nature


def test_contexts_hold_tests_loops_and_early_exits(read):
    script = read(
        """
        import torch.distributed as td
        def save(rank):
            if rank != 0:
                return
            for name in names:
                td.barrier()
        save(td.get_rank())
        td.barrier()
        """
    )
    inside, outside = script.calls_of(BARRIER)
    test, loop = inside.context
    assert isinstance(test, If)
    assert (test.taken, test.exits) == (False, "return")
    assert isinstance(loop, Loop)
    assert outside.context == ()
    (found,) = differences_of(script)
    assert (found.rank, found.more.call.line, found.sure) == (0, inside.line, True)


def test_methods_of_values_have_canonical_names(read):
    script = read(
        """
        from torch.cuda.amp import GradScaler
        class Trainer:
            def __init__(self):
                self.scaler = GradScaler()
            def step(self, optimizer):
                self.scaler.unscale_(optimizer)
        Trainer().step(None)
        """
    )
    (unscale,) = script.methods("unscale_")
    assert unscale.target == f"{SCALER}.unscale_"


def test_a_spawned_function_gets_the_rank_first(read):
    script = read(
        """
        import torch.distributed as dist
        import torch.multiprocessing as mp
        def work(index, count):
            dist.init_process_group("gloo", rank=index, world_size=count)
            if index == 0:
                dist.barrier()
        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
        """
    )
    (found,) = differences_of(script)
    assert (found.rank, found.more.op, found.sure) == (0, "barrier", True)


def test_imports_do_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    package = tmp_path / "project" / "tools"
    package.mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text("")
    (package / "comm.py").write_text(
        "import torch.distributed as d\ndef meet():\n    d.barrier()\n"
    )
    script = tmp_path / "project" / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text("from tools.comm import meet\nmeet()\n")
    found = []
    for folder, name in ((tmp_path, "project/scripts/train.py"), (script.parent, "train.py")):
        monkeypatch.chdir(folder)
        read = Script(script.__class__(name))
        found.append([module.path.name for module in read.modules])
    assert found == [["train.py", "comm.py"]] * 2


def test_scripts_that_go_round_in_circles_end(read):
    script = read(
        "def f(n):\n    return g(n)\ndef g(n):\n    return f(n) + f(n + 1)\nx = f(0)\n"
        "while x:\n    x = f(x)\n"
    )
    value = ast.parse("x").body[0].value
    assert script.truth(value, script.modules[0].scope, 0) is None
    assert differences_of(script) == []


@pytest.mark.parametrize("again", ["tqdm(loader)", "[one for one in loader]"])
def test_checks_end_if_a_value_is_made_from_itself(read, again):
    script = read(f"""
        import torch
        from torch import nn
        from tqdm import tqdm
        def train(opt, loader, gpus):
            for epoch in range(9):
                gpus = list(gpus)
                loader = {again}
                model = nn.DataParallel(nn.Linear(3, 3).cuda(), gpus)
                for i, x in enumerate(loader):
                    model(x).sum().backward()
                    if i % 4 == 3:
                        opt.step()
    """)
    assert "G06" in {finding.id for finding in apply("script", script)}


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\x00"])
def test_what_is_not_python_is_a_usage_error(read, text):
    with pytest.raises(UsageError):
        read(text)


def test_a_checked_script_is_released(tmp_path):
    path = tmp_path / "train.py"
    path.write_text((CORPUS / "H03" / "broken.py").read_text())
    script = Script(path)
    assert apply("script", script)
    gone = weakref.ref(script)
    del script
    gc.collect()
    assert gone() is None
