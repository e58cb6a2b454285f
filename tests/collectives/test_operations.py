"""Every collective computes what its definition says, for any number of ranks, size, and type. The
ranks here are threads. They synchronize through the same bells, sockets, and shared memory as
processes.
"""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from paralab.collectives import staging
from paralab.collectives.mesh import Mesh
from paralab.collectives.operations import Collectives, split
from paralab.collectives.thread import OrderedThread

SECONDS = 20.0
SIZES = (0, 1, 2, 7, 60, 1000)  # elements; a slot has 240 bytes here
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """Slots have only 240 bytes, so a thousand numbers need many rounds."""
    monkeypatch.setattr(staging.Staging, "slot_bytes", 240)
    monkeypatch.setattr(staging.Staging, "small_bytes", 40)


def in_ranks(size, work):
    """Return what `work(collectives)` returns on each rank, or the error that it raises."""
    store, results = dist.HashStore(), [None] * size

    def rank(number):
        mesh = Mesh.connect(store, number, size, SECONDS)
        try:
            results[number] = work(Collectives(mesh))
        except dist.DistBackendError as error:
            mesh.abort(error)
            results[number] = error
        finally:
            mesh.close()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
        assert not thread.is_alive()
    return results


def values(rank, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randint(0, 5, (size,), generator=generator).to(dtype)


def test_a_range_is_split_as_torch_splits_it():
    # 10 over 4:  0 1 2 | 3 4 5 | 6 7 8 | 9
    assert [(part.start, part.stop) for part in split(10, 4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [part.stop - part.start for part in split(5, 4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("few", [0, 5], ids=["slices", "everyone reduces"])
def test_all_reduce_on_any_size_and_type(ranks, few, monkeypatch):
    monkeypatch.setattr(staging.Staging, "few_ranks", few)
    cases = [(size, dtype) for size in SIZES for dtype in (*FLOATS, *WHOLE)]

    def work(run):
        tensors = [values(run.rank, size, dtype) for size, dtype in cases]
        for tensor in tensors:
            run.all_reduce(tensor, "SUM", None, SECONDS)
        return tensors

    results = in_ranks(ranks, work)
    for place, (size, dtype) in enumerate(cases):
        expected = sum(values(rank, size) for rank in range(ranks)).to(dtype)
        for tensors in results:
            assert torch.equal(tensors[place], expected), (size, dtype)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("SUM", lambda all: all.sum(0)),
        ("AVG", lambda all: all.mean(0)),
        ("PRODUCT", lambda all: all.prod(0)),
        ("MAX", lambda all: all.amax(0)),
        ("MIN", lambda all: all.amin(0)),
    ],
)
def test_operators_on_numbers(operator, expected):
    def work(run):
        floats, whole = values(run.rank, 500), values(run.rank, 500, torch.int64)
        run.all_reduce(floats, operator, None, SECONDS)
        run.all_reduce(whole, operator, None, SECONDS)
        return floats, whole

    everything = torch.stack([values(rank, 500) for rank in range(3)])
    for floats, whole in in_ranks(3, work):
        torch.testing.assert_close(floats, expected(everything), rtol=1e-15, atol=0)
        assert torch.equal(whole, expected(everything).trunc().long())


@pytest.mark.parametrize("operator", ["SUM", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR"])
def test_operators_on_booleans(operator):
    inputs = [
        torch.tensor([bool(number & 4), bool(number & 2), bool(number & 1)] * 300)
        for number in (1, 3, 5)
    ]

    def work(run):
        tensor = inputs[run.rank].clone()
        run.all_reduce(tensor, operator, None, SECONDS)
        return tensor[:3].tolist()

    #        4      2      1     of 1, 3, and 5
    anyone = [True, True, True]
    everyone = [False, False, True]
    odd = [True, True, True]
    expected = {"SUM": anyone, "MAX": anyone, "BOR": anyone, "BXOR": odd}.get(operator, everyone)
    assert in_ranks(3, work) == [expected] * 3


def test_low_precision_rounds_once():
    # In bfloat16, 256 + 1 is 256, twice in a row. With a single rounding, 256 + 1 + 1 is 258.
    def work(run):
        tensor = torch.full((900,), 256.0 if run.rank == 0 else 1.0, dtype=torch.bfloat16)
        run.all_reduce(tensor, "SUM", None, SECONDS)
        return tensor.unique().tolist()

    assert in_ranks(3, work) == [[258.0]] * 3


def test_all_ranks_get_the_same_bits_every_time():
    def work(run):
        generator = torch.Generator().manual_seed(run.rank)
        tensor = torch.randn(999, generator=generator)
        run.all_reduce(tensor, "SUM", None, SECONDS)
        return tensor

    first, again = in_ranks(5, work), in_ranks(5, work)
    assert all(torch.equal(first[0], each) for each in (*first, *again))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_collectives_that_move_or_scatter(ranks, size):
    root = ranks - 1

    def work(run):
        mine = values(run.rank, size)
        gathered = [torch.empty(size, dtype=torch.float64) for _ in range(ranks)]
        run.all_gather(mine, gathered, SECONDS)
        copied = mine.clone()
        run.broadcast(copied, root, SECONDS)
        reduced = mine.clone()
        run.all_reduce(reduced, "SUM", root, SECONDS)
        at_root = [torch.empty_like(mine) for _ in range(ranks if run.rank == root else 0)]
        run.gather(mine, at_root, root, SECONDS)
        scattered = torch.empty_like(mine)
        run.scatter(
            scattered,
            [mine + rank for rank in range(ranks)] if run.rank == root else [],
            root,
            SECONDS,
        )
        mixed = [torch.empty_like(mine) for _ in range(ranks)]
        run.all_to_all([mine + 10 * rank for rank in range(ranks)], mixed, SECONDS)
        part = torch.empty_like(mine)
        run.reduce_scatter(part, [mine + rank for rank in range(ranks)], "SUM", SECONDS)
        run.barrier(SECONDS)
        return gathered, copied, reduced, at_root, scattered, mixed, part

    inputs = [values(rank, size) for rank in range(ranks)]
    for rank, result in enumerate(in_ranks(ranks, work)):
        gathered, copied, reduced, at_root, scattered, mixed, part = result
        assert torch.equal(torch.stack(gathered), torch.stack(inputs))
        assert torch.equal(copied, inputs[root])
        assert torch.equal(reduced, sum(inputs) if rank == root else inputs[rank])
        assert not at_root or torch.equal(torch.stack(at_root), torch.stack(inputs))
        assert torch.equal(scattered, inputs[root] + rank)
        assert all(torch.equal(each, inputs[other] + 10 * rank) for other, each in enumerate(mixed))
        assert torch.equal(part, sum(inputs) + ranks * rank)


def test_ranks_may_exchange_different_amounts():
    # rank r sends 100 · (r + 1) · (d + 1) bytes to rank d; only the largest needs 30 rounds
    def work(run):
        inputs = [
            torch.full((100 * (run.rank + 1) * (to + 1),), run.rank * 10 + to, dtype=torch.uint8)
            for to in range(3)
        ]
        outputs = [
            torch.empty(100 * (source + 1) * (run.rank + 1), dtype=torch.uint8)
            for source in range(3)
        ]
        run.all_to_all(inputs, outputs, SECONDS)
        gathered = [torch.empty(number * 400, dtype=torch.uint8) for number in range(3)]
        run.all_gather(
            torch.full((run.rank * 400,), run.rank, dtype=torch.uint8), gathered, SECONDS
        )
        return [each.unique().tolist() for each in (*outputs, *gathered)]

    for rank, result in enumerate(in_ranks(3, work)):
        assert result == [[rank], [10 + rank], [20 + rank], [], [1], [2]]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (("all_reduce", 4), ("all_reduce", 5), ["[4]", "[5]"]),
        (("all_reduce", 4), ("broadcast", 4), ["all_reduce", "broadcast"]),
        (("barrier", 0), ("all_reduce", 4), ["barrier", "all_reduce"]),
        (("broadcast", 400), ("broadcast", 4), ["[400]", "[4]"]),
    ],
)
def test_ranks_that_make_different_calls_are_told_both(first, second, words):
    def work(run):
        name, size = (first, second)[run.rank]
        tensor = torch.zeros(size)
        if name == "barrier":
            run.barrier(SECONDS)
        elif name == "broadcast":
            run.broadcast(tensor, 0, SECONDS)
        else:
            run.all_reduce(tensor, "SUM", None, SECONDS)

    for error in in_ranks(2, work):
        assert isinstance(error, dist.DistBackendError)
        assert all(word in str(error) for word in (*words, "rank 0", "rank 1"))


def test_a_different_type_or_amount_is_an_error_too():
    def work(run):
        dtype = torch.float32 if run.rank else torch.float64
        run.all_reduce(torch.zeros(8, dtype=dtype), "SUM", None, SECONDS)

    assert all("float64" in str(error) and "float32" in str(error) for error in in_ranks(2, work))

    def uneven(run):
        inputs = [torch.zeros(3, dtype=torch.uint8)] * 2
        outputs = [torch.zeros(3 + run.rank, dtype=torch.uint8) for _ in range(2)]
        run.all_to_all(inputs, outputs, SECONDS)

    assert "3 bytes" in str(in_ranks(2, uneven)[1])


def test_whoever_left_is_named_and_its_victims_are_not():
    # Rank 2 leaves. Rank 0 notices, and gives up. Rank 1 comes later and must blame rank 2.
    noticed = threading.Event()

    def work(run):
        if run.rank == 2:
            return
        if run.rank == 1:
            noticed.wait(SECONDS)
            time.sleep(0.2)
        try:
            run.barrier(SECONDS)
        finally:
            noticed.set()

    results = in_ranks(3, work)
    assert [isinstance(each, dist.DistBackendError) for each in results] == [True, True, False]
    assert all(str(error).startswith("Rank 2 left the group") for error in results[:2])


def test_a_rank_that_dies_while_the_group_is_set_up_is_named(monkeypatch):
    # The others reported a broken connection, or blamed a rank that had given up for this reason.
    original = Mesh.exchange_files

    def exchange(mesh, files):
        if mesh.rank != 1:
            return original(mesh, files)
        for peer in mesh.peers.values():  # as if it had died
            peer.control.close()
        raise ConnectionAbortedError

    monkeypatch.setattr(Mesh, "exchange_files", exchange)
    store, errors = dist.HashStore(), {}

    def rank(number):
        try:
            Mesh.connect(store, number, 3, SECONDS)
        except dist.DistBackendError as error:
            errors[number] = str(error)
        except ConnectionAbortedError:
            pass

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert sorted(errors) == [0, 2]
    assert all(error.startswith("Rank 1 died") for error in errors.values()), errors


def test_a_late_rank_is_named_at_the_timeout():
    def work(run):
        if run.rank == 1:
            time.sleep(1)
        else:
            run.barrier(0.2)

    errors = in_ranks(3, work)
    assert "rank 1" in str(errors[0]) or "rank 1" in str(errors[2])
    assert "barrier" in str(errors[0])


def test_no_rank_reads_what_another_one_already_overwrites():
    # Ranks with different speeds make calls of 1 to 40 rounds in random order. Writing to a slot
    # too early would change a sum.
    sizes = torch.randint(1, 1200, (150,), generator=torch.Generator().manual_seed(0)).tolist()

    def work(run):
        wrong = []
        pause = torch.Generator().manual_seed(run.rank)
        for number, size in enumerate(sizes):
            if torch.rand((), generator=pause) < 0.1:
                time.sleep(0.002)
            mine = torch.full((size,), float(number + run.rank), dtype=torch.float64)
            if number % 3 == 0:
                outputs = [torch.empty_like(mine) for _ in range(3)]
                run.all_gather(mine, outputs, SECONDS)
                total = sum(outputs)
            elif number % 3 == 1:
                total = torch.empty_like(mine)
                run.reduce_scatter(total, [mine] * 3, "SUM", SECONDS)
            else:
                total = mine
                run.all_reduce(total, "SUM", None, SECONDS)
            if not torch.equal(total, torch.full_like(total, 3.0 * number + 3)):
                wrong.append(number)
        return wrong

    assert in_ranks(3, work) == [[], [], []]


def test_reduce_scatter_into_its_own_input():
    # The output is this rank's part of the input. Ranks 2 and up once added it twice.
    def work(run):
        whole = torch.arange(4 * 30.0) + run.rank
        parts = list(whole.view(4, -1).unbind())
        run.reduce_scatter(parts[run.rank], parts, "SUM", SECONDS)
        return parts[run.rank]

    for rank, part in enumerate(in_ranks(4, work)):
        assert torch.equal(part, 4 * torch.arange(30.0 * rank, 30.0 * rank + 30) + 6)


def test_another_type_of_output_is_an_error():
    def work(run):
        run.all_gather(torch.zeros(3), [torch.zeros(3, dtype=torch.int32)] * 2, SECONDS)

    assert all("int32" in str(error) for error in in_ranks(2, work))


def test_closing_twice_closes_no_foreign_file():
    meshes = {}

    def work(run):
        meshes[run.rank] = run.mesh

    in_ranks(2, work)  # it closes them
    file = os.open("/dev/null", os.O_RDONLY)
    for mesh in meshes.values():
        mesh.close()
    os.fstat(file)  # this raises if the file is closed
    os.close(file)


def test_an_interrupted_collective_blocks_nothing():
    # Ctrl-C in the caller's thread once left a lock behind, so the next call waited forever.
    reasons = []
    thread = OrderedThread("test", reasons.append)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thread.submit(interrupted, {}, caller_waits=True)
    with pytest.raises(dist.DistBackendError, match="KeyboardInterrupt"):
        thread.submit(lambda: None, {}, caller_waits=True).wait()
    assert len(reasons) == 1
    assert thread.close(SECONDS)


@pytest.mark.processes
def test_a_forked_child_closes_its_copies_and_the_parent_goes_on():
    # A DataLoader's workers once kept the connections of a dead rank open, so nobody noticed.
    def work(run):
        open_in_child = 0
        if run.rank == 0:
            child = os.fork()
            if not child:
                os._exit(len(run.mesh.peers))
            open_in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        run.barrier(SECONDS)
        return open_in_child

    assert in_ranks(2, work) == [0, 0]


def test_a_thread_for_collectives_leaves_the_training_threads_alone():
    """The backend once set the number of threads to 1 for the training thread too. A DDP step of
    gpt:small on 16 cores took three times as long as over gloo."""
    numbers, before = [], torch.get_num_threads()

    def train():
        torch.set_num_threads(3)
        thread = OrderedThread("test", print)
        numbers.append(torch.get_num_threads())
        torch.set_num_threads(5)  # later, as in a script that creates its process group first
        numbers.append(thread.submit(torch.get_num_threads, {}).result())
        thread.close(SECONDS)

    training = threading.Thread(target=train)
    training.start()
    training.join()
    torch.set_num_threads(before)
    assert numbers == [3, 1]
