"""Promise: of the processes that hold a part, exactly one writes it, and none asks the others which; for 4,096
processes."""

import random
from collections import Counter
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Divide
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate_recipes.common.checkpoint.writer import assign, collect_shards
from accelerate_recipes.common.weights.shards import Shard, holders, shard_range, shards_of

SIZES = {"dp_replicate": 8, "dp_shard": 64, "tp": 8}
WORLD = 8 * 64 * 8
RANKS = torch.arange(WORLD).view(*SIZES.values())
# {name: (shape, the dimension of the tensor that each dimension of the mesh divides)}; without the last, FSDP2 alone
# divides the tensor, and tensor parallelism repeats it.
TENSORS: dict[str, tuple[tuple[int, ...], list[int | None]]] = {
    "colwise": ((1024, 3), [None, 0, 0]),
    "rowwise": ((640, 80), [None, 0, 1]),
    "fewer rows than processes": ((50, 7), [None, 0, 1]),
    "in each part": ((640,), [None, 0, None]),
    "embedding": ((1000, 16), [None, 0]),
    "norm": ((129,), [None, 0]),
    "nowhere divided": ((5,), [None, None]),
}
WHOLE = {f"step {number}": torch.zeros(()) for number in range(5)} | {"table": torch.zeros(30)}


def mesh_at(rank: int, cuts: list[int | None]) -> tuple[torch.Tensor, list[int]]:
    """The mesh that divides a tensor, and the coordinate of a process in it."""
    coordinate = (rank == RANKS).nonzero()[0].tolist()
    return (RANKS, coordinate) if len(cuts) == 3 else (RANKS[..., coordinate[-1]], coordinate[:-1])


def divided_at(rank: int) -> list[Shard]:
    parts = []
    for name, (shape, cuts) in TENSORS.items():
        mesh, coordinate = mesh_at(rank, cuts)
        offsets, sizes = shard_range(shape, mesh.shape, cuts, coordinate)
        if 0 not in sizes:
            writers = holders(mesh, cuts, coordinate, WORLD)
            parts.append(Shard(name, shape, offsets, sizes, partial(torch.zeros, sizes), writers))
    return parts


@pytest.mark.parametrize("rank", [0, WORLD - 1, *random.Random(31).sample(range(WORLD), 2)])
def test_each_part_is_written_once(rank: int) -> None:
    shard = int((rank == RANKS).nonzero()[0, 1])
    written: Counter[tuple] = Counter()
    for peer in RANKS[:, shard].flatten().tolist():  # all that hold the same part of a divided tensor
        parts = divided_at(peer)
        mine = assign(parts, peer)
        written.update((part.name, part.offsets) for part in parts if part.name in mine)
    for part in divided_at(rank):
        if part.name == "nowhere divided":
            assert part.writers == tuple(range(WORLD))
        else:
            assert rank in part.writers and written[part.name, part.offsets] == 1, part


def test_whole_tensors_are_written_once() -> None:
    parts = [Shard.whole(name, tensor, range(WORLD)) for name, tensor in WHOLE.items()]
    written = Counter(name for rank in range(WORLD) for name in assign(parts, rank))
    assert written == dict.fromkeys(WHOLE, 1)


def test_plan_of_a_save_asks_nobody() -> None:
    """The parts of real DTensors are those of the simulation; a collective would be counted."""
    rank = 3701
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
        tensors = {}
        for name, (shape, cuts) in TENSORS.items():
            on = mesh if len(cuts) == 3 else mesh["dp_replicate", "dp_shard"]
            held = torch.zeros(shard_range(shape, on.shape, cuts, on.get_coordinate())[1])
            places = [Replicate() if along is None else Divide(along) for along in cuts]
            tensors[name] = DTensor.from_local(
                held, on, places, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
            )
        with CommDebugMode() as counted:
            shards = [shard for name, tensor in tensors.items() for shard in shards_of(name, tensor, range(WORLD))]
            own = collect_shards(shards, rank)
        assert counted.get_total_counts() == 0
    finally:
        dist.destroy_process_group()
    places = [(part.name, part.offsets, part.sizes, part.writers) for part in shards]
    assert places == [(part.name, part.offsets, part.sizes, part.writers) for part in divided_at(rank)]
    assert {part.name for part, _ in own} == assign(shards, rank)
