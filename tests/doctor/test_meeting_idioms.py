"""How ranks rendezvous, and the order of their passes: code that looks like a mistake but is not,
next to similar code that is."""

import textwrap

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.static.script import Script

SPAWNED = """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def work(local, node):
        dist.init_process_group("gloo", rank={rank}, world_size={world})
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(work, args=(1,), nprocs={started})
"""
STORE = """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    {store}
    dist.destroy_process_group()
"""
DETAIL = """
    import os
    {before}
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    {after}
    dist.init_process_group("{backend}")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()
"""
PASSES = """
    import contextlib
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(3):
        parts = torch.randn(8, 2).chunk(4)
        optimizer.zero_grad()
        outputs = []
        for i, part in enumerate(parts):
            with {forward}:
                outputs.append(model(part))
        {backward}
        optimizer.step()
    dist.destroy_process_group()
"""
ALL_BUT_LAST = "model.no_sync() if i < 3 else contextlib.nullcontext()"
ONE_BY_ONE = f"for i, output in enumerate(outputs):\n            with {ALL_BUT_LAST}:\n                (output.mean() / 4).backward()"
SET = 'os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"'
CASES = {
    "ranks of two machines": (SPAWNED.format(rank="node * 2 + local", world=4, started=2), set()),
    "as many as are started": (SPAWNED.format(rank="local", world=2, started=2), set()),
    "one too few": (SPAWNED.format(rank="local", world=3, started=2), {"H18"}),
    "how many is not known": (
        SPAWNED.format(rank="local", world="dist.get_world_size()", started=2),
        set(),
    ),
    "one server": (STORE.format(store='dist.TCPStore("a", 29500, 2, is_master=rank == 0)'), set()),
    "the server in a branch": (
        STORE.format(store='if rank == 0: dist.TCPStore("a", 29500, 2, is_master=True)'),
        set(),
    ),
    "any free port": (STORE.format(store='dist.TCPStore("a", 0, 2, is_master=True)'), set()),
    "one server for several": (
        STORE.format(store='dist.TCPStore("a", 29500, 2, is_master=True, multi_tenant=True)'),
        set(),
    ),
    "a server each": (STORE.format(store='dist.TCPStore("a", 29500, 2, True)'), {"L01"}),
    "after the import it has no effect": (
        DETAIL.format(before="", after=SET, backend="gloo"),
        set(),
    ),
    "before the import": (DETAIL.format(before=SET, after="", backend="gloo"), {"H19"}),
    "by update": (
        DETAIL.format(
            before='os.environ.update(TORCH_DISTRIBUTED_DEBUG="detail")', after="", backend="gloo"
        ),
        {"H19"},
    ),
    "not on gloo": (DETAIL.format(before=SET, after="", backend="nccl"), set()),
    "read again": (
        DETAIL.format(
            before="", after=f"{SET}\n    dist.set_debug_level_from_env()", backend="gloo"
        ),
        {"H19"},
    ),
    "one backward of the sum": (
        PASSES.format(
            forward="contextlib.nullcontext()", backward="sum(outputs).mean().backward()"
        ),
        set(),
    ),
    "prepared by hand": (
        PASSES.format(
            forward="model.no_sync()",
            backward=f"model.reducer.prepare_for_backward([])\n        {ONE_BY_ONE}",
        ),
        set(),
    ),
    "the first backward exchanges": (
        PASSES.format(forward=ALL_BUT_LAST, backward=ONE_BY_ONE),
        {"P06"},
    ),
    "no_sync in the backwards only": (
        PASSES.format(forward="contextlib.nullcontext()", backward=ONE_BY_ONE),
        {"P06"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_meeting(name, tmp_path):
    text, expected = CASES[name]
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    found = {finding.id for finding in apply("script", Script(script))}
    assert found & {"H18", "L01", "H19", "P06", "G03"} == expected
