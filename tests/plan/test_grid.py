"""Which rank uses which device, and which ranks are together along each axis."""

from paralab.plan.grid import grid, ranks_along


def names(*args):
    return [[device.name for device in row] for row in grid(*args)]


def test_hybrid_is_placed_as_in_practical_10():
    assert names("hybrid", 2, 2, "spread", 4) == [
        ["cuda:0", "cuda:2"],  # rank 0
        ["cuda:1", "cuda:3"],  # rank 1
    ]


def test_same_placement_puts_all_stages_of_a_rank_on_one_device():
    assert names("hybrid", 2, 2, "same", 4) == [["cuda:0", "cuda:0"], ["cuda:1", "cuda:1"]]


def test_one_process_or_one_per_replica():
    assert names("dp", 3, 1, "spread", 0) == [["cpu:0", "cpu:1", "cpu:2"]]
    assert names("ddp", 3, 1, "spread", 0) == [["cpu:0"], ["cpu:1"], ["cpu:2"]]
    assert names("pipeline", 1, 3, "spread", 0) == [["cpu:0", "cpu:1", "cpu:2"]]


def test_fewer_gpus_than_requested_are_marked_as_shared():
    [row] = grid("dp", 3, 1, "spread", 1)
    assert [(device.name, device.shared, device.virtual) for device in row] == [
        ("cuda:0", True, False)
    ] * 3


def test_cpu_devices_are_virtual_when_there_are_several():
    assert not grid("single", 1, 1, "spread", 0)[0][0].virtual
    assert all(device.virtual for row in grid("ddp", 2, 1, "spread", 0) for device in row)


def test_shards_are_neighbors_and_replicas_are_far_apart():
    cells = [(r, s, t) for r in (0, 1) for s in (0, 1) for t in (0, 1)]
    assert ranks_along("shards", cells) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert ranks_along("stages", cells) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert ranks_along("replicas", cells) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_each_cell_of_the_grid_has_its_own_device():
    rows = grid("hybrid", 1, 2, "spread", 4, True, shards=2)
    assert [(device.name, device.role) for [device] in rows] == [
        ("cuda:0", "stage 0, shard 0"),
        ("cuda:1", "stage 0, shard 1"),
        ("cuda:2", "stage 1, shard 0"),
        ("cuda:3", "stage 1, shard 1"),
    ]
