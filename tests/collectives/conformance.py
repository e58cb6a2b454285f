"""Run this under torchrun with 3 ranks. It compares torch's own components on `local` with plain
arithmetic or with gloo, and prints a line for each check that passes.

    conformance.py BACKEND [cpu|cuda]
"""

import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from paralab.collectives.reduction import DTYPES, can_reduce

warnings.simplefilter("error", UserWarning)  # `local` warns if it leaves a call to gloo
OPERATORS = ("SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR")
DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
# A GPU sums a matrix product in a different order.
CLOSE = {"rtol": 0, "atol": 1e-15 if DEVICE.type == "cpu" else 1e-13}
# These have had new names since torch 2.13.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
torch.manual_seed(0)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).double()


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(4, 6, dtype=torch.float64, generator=generator, device="cpu")
    return numbers.to(DEVICE)


def serial(steps=2):
    """Train on all ranks' batches at once."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        plain(torch.cat([batch(rank) for rank in range(SIZE)])).square().mean().backward()
        optimizer.step()
    return plain.state_dict()


def train(parallel, steps=2):
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        parallel(batch(RANK)).square().mean().backward()
        optimizer.step()


def close(states):
    for name, value in serial().items():
        torch.testing.assert_close(states[name], value, **CLOSE)


def views():
    table = torch.arange(12.0).view(3, 4) + RANK
    columns = table.t()[::2]  # neither contiguous nor dense
    dist.all_reduce(columns)
    expected = (torch.arange(12.0).view(3, 4) + 1).t()[::2] * SIZE
    assert torch.equal(columns, expected)
    assert torch.equal(table[:, 1], torch.arange(12.0).view(3, 4)[:, 1] + RANK)  # untouched

    outputs = [torch.empty(4, 6)[:, ::2] for _ in range(SIZE)]
    dist.all_gather(outputs, torch.full((4, 3), float(RANK)))
    assert [each.unique().item() for each in outputs] == [0.0, 1.0, 2.0]


def public_functions():
    tensor = torch.full((5,), RANK + 1.0)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    if DEVICE.type == "cuda":  # there, only the stream waits
        torch.cuda.synchronize()
    assert work.is_completed()
    assert tensor.tolist() == [2.0] * 5
    mine = torch.tensor([RANK])
    everything = torch.empty(SIZE, dtype=torch.int64)
    gather_single(everything, mine)
    assert everything.tolist() == [0, 1, 2]
    part = torch.empty(1, dtype=torch.int64)
    scatter_single(part, everything)
    assert part.item() == SIZE * RANK
    outputs = torch.empty(3, dtype=torch.int64)
    dist.all_to_all_single(outputs, torch.arange(3) + 10 * RANK)
    assert outputs.tolist() == [RANK, 10 + RANK, 20 + RANK]
    dist.reduce(tensor, dst=1)
    assert tensor.tolist() == [6.0 if RANK == 1 else 2.0] * 5
    parts = [torch.empty(2) for _ in range(SIZE)] if RANK == 2 else None
    dist.gather(torch.full((2,), float(RANK)), parts, dst=2)
    assert RANK != 2 or [each[0].item() for each in parts] == [0, 1, 2]
    dist.scatter(
        tensor, [torch.full((5,), float(r)) for r in range(3)] if RANK == 0 else None, src=0
    )
    assert tensor.tolist() == [float(RANK)] * 5
    dist.barrier()


def objects():
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK, "text": "x" * (10 + 1000 * RANK)})
    assert [each["rank"] for each in found] == [0, 1, 2]
    shared = [{"from": RANK}]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [{"from": 1}]


def subgroups():
    odd, even = dist.new_group([1]), dist.new_group([0, 2])
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor, group=odd if RANK == 1 else even)
    assert tensor.item() == (1 if RANK == 1 else 2)
    assert dist.get_backend(even if RANK != 1 else odd) == "local"


def point_to_point():
    large = torch.full((300_000,), float(RANK))
    received = torch.empty_like(large)
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    # Every rank sends first, around a ring, and more than a socket's buffer holds.
    sends = [dist.isend(large, after), dist.isend(large[:3], after, tag=7)]
    tagged = torch.empty(3)
    dist.recv(tagged, before, tag=7)  # receive the second message first
    dist.recv(received, before)
    for work in sends:
        work.wait()
    assert received.unique().item() == before
    assert tagged.unique().item() == before


def unusual_tensors():
    # An empty view, or one with a single element, can have any stride. Its bytes once could not be
    # sent, nor could an empty tensor be gathered.
    table = torch.full((4, 3), float(RANK))
    for tensor in (table[:0, ::2], table[:1, ::2], table[2:, 1:][::3, ::3], torch.tensor(1.0)):
        mine, size = tensor.clone(), tensor.numel()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, mine + (SIZE - 1 if mine.dim() == 0 else 3 - mine))
        outputs = torch.empty(SIZE * size)
        gather_single(outputs, tensor.reshape(-1))
        scatter_single(torch.empty(size), outputs)
        work = dist.isend(tensor, (RANK + 1) % SIZE)
        dist.recv(tensor, (RANK - 1) % SIZE)
        work.wait()

    # Our thread could not write to inference tensors.
    with torch.inference_mode():
        inferred = torch.ones(5)
        for work in [dist.all_reduce(inferred, async_op=True) for _ in range(2)]:
            work.wait()
        assert inferred.tolist() == [9.0] * 5


def tags():
    # Rank 1 waits for tag 1, which rank 0 sends after the answer to tag 2. The call that waited for
    # tag 1 once blocked the other one.
    ones, twos, answer = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    if RANK == 0:
        dist.send(twos + 2, 1, tag=2)
        dist.recv(answer, 1, tag=3)
        dist.send(answer - 2, 1, tag=1)
    elif RANK == 1:
        first = dist.irecv(ones, 0, tag=1)
        dist.irecv(twos, 0, tag=2).wait()
        dist.send(twos + 1, 0, tag=3)
        first.wait()
        assert (ones[0].item(), twos[0].item()) == (1, 2)


def any_source():
    # Rank 0 also has a named receive, whose message comes last.
    if RANK:
        dist.send(torch.full((4,), float(RANK)), 0, tag=RANK - 1)
        dist.send(torch.full((300_000,), 5.0), 0, tag=5)
        dist.send(torch.zeros(2), 0, tag=9)
        return
    named, small, large = torch.ones(2), torch.empty(4), torch.empty(300_000)
    first = dist.irecv(named, 2, tag=9)
    assert (dist.recv(small), small.unique().item()) == (1, 1)
    assert (dist.recv(small, tag=1), small.unique().item()) == (2, 2)
    assert {dist.recv(large, tag=5), dist.recv(large, tag=5)} == {1, 2}
    assert large.unique().item() == 5
    first.wait()
    dist.recv(named, 1, tag=9)
    assert not named.any()


def two_threads():
    # Both threads once made their own connection, and mixed up their messages.
    peer, wrong = 1 - RANK, []
    together = threading.Barrier(2)

    def exchange(tag):
        together.wait()
        for _ in range(10):
            sent = dist.isend(torch.full((300_000,), float(tag)), peer, tag=tag, group=pair)
            tensor = torch.zeros(300_000)
            dist.recv(tensor, peer, tag=tag, group=pair)
            wrong.extend(tensor[tensor != tag].tolist())
            sent.wait()

    pair = dist.new_group([0, 1])
    if RANK < 2:
        threads = [threading.Thread(target=exchange, args=[tag], daemon=True) for tag in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert wrong == []


def raises(words, call, *arguments, **options):
    message = "no error"
    try:
        call(*arguments, **options)
    except RuntimeError as error:
        message = str(error)
    assert all(word in message for word in words), message


def errors():
    # Messages once counted the ranks within the group: rank 1 of [1, 2] is rank 2.
    pair = dist.new_group([1, 2])
    if RANK > 0:
        words = ("rank 1 is broadcast with root 2", "rank 2 calls all_reduce")
        if RANK == 2:
            words = ("rank 2 is all_reduce", "rank 1 calls broadcast with root 2")
            raises(words, dist.all_reduce, torch.ones(3), group=pair)
        else:
            raises(words, dist.broadcast, torch.ones(3), src=2, group=pair)

    # One rank's own mistake did not say which rank made it.
    group = dist.new_group()
    words = ("of [[2], [7]] failed",) if RANK == 1 else ("Rank 1: ", "of [[2], [7]] failed")
    outputs = torch.empty(7 if RANK == 1 else 2 * SIZE)
    raises(words, gather_single, outputs, torch.ones(2), group=group)

    # `wait` ignored its timeout, and the group ignored a timeout that was set later.
    group, done = dist.new_group(), dist.new_group(backend="gloo")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    if RANK == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        if DEVICE.type == "cpu":
            raises(("within",), work.wait, timedelta(seconds=0.05))
        raises(("Rank 0 waited", "timeout"), work.wait)
    dist.barrier(done)

    # A call on a destroyed group waited forever.
    group = dist.new_group()
    dist.destroy_process_group(group)
    raises(("destroyed",), group.allreduce, [torch.ones(3)], dist.AllreduceOptions())


def released():
    # The thread once kept the tensors of its last call.
    memory = []
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    weakref.finalize(tensor, memory.append, "released")
    del tensor, work
    deadline = time.monotonic() + 30
    while not memory and time.monotonic() < deadline:
        time.sleep(0.01)
    assert memory == ["released"]


def ddp():
    parallel = DistributedDataParallel(model(), bucket_cap_mb=0.0005)
    train(parallel)
    close(parallel.module.state_dict())


def fsdp():
    mesh = init_device_mesh(DEVICE.type, (SIZE,))
    parallel = model()
    for layer in parallel:
        fully_shard(layer, mesh=mesh)
    fully_shard(parallel, mesh=mesh)
    train(parallel)
    close({name: value.full_tensor() for name, value in parallel.state_dict().items()})

    folder = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(folder)
    state = parallel.state_dict()
    dcp.save(state, checkpoint_id=folder[0])
    for value in state.values():
        value.to_local().zero_()
    dcp.load(state, checkpoint_id=folder[0])
    close({name: value.full_tensor() for name, value in state.items()})


def dtensor():
    mesh = init_device_mesh(DEVICE.type, (SIZE,))
    whole = torch.arange(30.0).view(6, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.equal(rows.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    assert rows.sum().full_tensor().item() == whole.sum().item()


def pipeline():
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6).double() for _ in range(SIZE)]
    stage = PipelineStage(layers[RANK], RANK, SIZE, DEVICE)
    inputs, targets = torch.cat([batch(0), batch(1)]), torch.zeros(8, 6, dtype=torch.float64)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    if RANK == 0:
        schedule.step(inputs)
    elif RANK == SIZE - 1:
        schedule.step(target=targets)
    else:
        schedule.step()
    plain = nn.Sequential(*[nn.Linear(6, 6).double() for _ in range(SIZE)])
    for mine, theirs in zip(plain, layers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    nn.functional.mse_loss(plain(inputs), targets).backward()
    torch.testing.assert_close(layers[RANK].weight.grad, plain[RANK].weight.grad, **CLOSE)


def same_on_every_device():
    # Every operator and type gives the same bits as on the CPU.
    for dtype in DTYPES:
        for operator in OPERATORS:
            if not can_reduce(operator, dtype):
                continue
            generator = torch.Generator().manual_seed(RANK)
            mine = torch.randint(
                0, 2 if dtype == torch.bool else 5, (1001,), generator=generator, device="cpu"
            )
            expected, tensor = mine.to(dtype), mine.to(dtype).to(DEVICE)
            for each in (expected, tensor):
                dist.all_reduce(each, op=getattr(dist.ReduceOp, operator))
            # A GPU divides by multiplying by the inverse.
            near = 1e-6 if operator == "AVG" and dtype.is_floating_point else 0
            torch.testing.assert_close(tensor.cpu(), expected, rtol=near, atol=0)


def large():
    # This is larger than a slot, so it takes many rounds.
    for elements in (100_000_000, 100_000_001) if DEVICE.type == "cuda" else (10_000_001,):
        tensor = torch.full((elements,), RANK + 1.0)
        tensor[-1] = 0
        dist.all_reduce(tensor)
        assert tensor[:-1].eq(6).all()
        assert tensor[-1] == 0


def left_to_gloo():
    # What `local` does not support goes to gloo, with a warning.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensor = torch.eye(2).to_sparse()
        dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), SIZE * torch.eye(2))
    assert [each for each in caught if "gloo" in str(each.message)]


def again():
    # torchrun's agent keeps the store from one group to the next. A process's second group once
    # read the first group's addresses from it. Its ranks then waited for each other until the
    # timeout, or failed with "Connection refused".
    store = dist.distributed_c10d._get_default_store().underlying_store
    limit = timedelta(seconds=20)
    for _ in range(3):
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(sys.argv[1], store=store, rank=RANK, world_size=SIZE, timeout=limit)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 3


CHECKS = (
    views,
    public_functions,
    objects,
    subgroups,
    point_to_point,
    unusual_tensors,
    tags,
    any_source,
    two_threads,
    errors,
    released,
    ddp,
    fsdp,
    dtensor,
    pipeline,
    same_on_every_device,
    large,
    left_to_gloo,
    again,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    dist.init_process_group(sys.argv[1])
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    for check in CHECKS:
        check()
        dist.barrier()
        if RANK == 0:
            print(check.__name__, flush=True)
    dist.destroy_process_group()
    os._exit(0)
