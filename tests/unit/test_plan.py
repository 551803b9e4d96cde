"""Promise: the samples of a step depend only on the seed and the step."""

import itertools
import re

import pytest
import torch

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.parallel.strategies import layout_of
from accelerate_recipes.common.plan import Plan, split_batch


def test_seeds_give_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Plan.of(RunConfig(seed=seed), Layout(), 100).epoch_order(epoch).tolist()

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_plan_starts_at_any_step() -> None:
    plan = Plan.of(RunConfig(batch_size=8, micro_batch_size=2, max_steps=30), Layout(num_processes=2, rank=1), 50)
    whole = torch.stack([ids for _, ids in plan.micro_batches()])
    assert whole.shape == (30 * plan.accumulation, 2)
    assert torch.equal(torch.stack([ids for _, ids in plan.micro_batches(13)]), whole[13 * plan.accumulation :])


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sizes_divide_or_the_line_names_sizes_that_do(ranks: int, stages: int) -> None:
    layout = Layout(num_processes=ranks * stages, pp=stages)
    for batch_size, micro in itertools.product((1, 6, 8, 12, 64), (None, 1, 2, 3, 5, 8, 64)):
        try:
            size, accumulation = split_batch(RunConfig(batch_size=batch_size, micro_batch_size=micro), layout)
        except UsageError as error:
            flag, number = re.search(r"use --(batch_size|micro_batch_size) (\d+)", str(error)).groups()
            sizes = {"batch_size": batch_size, "micro_batch_size": None, flag: int(number)}
            if stages == 1:  # with stages, some need a larger batch, too
                split_batch(RunConfig(**sizes), layout)
        else:
            assert size * accumulation * ranks == batch_size and accumulation >= stages


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        (
            {"batch_size": 1},
            "not divisible by 2 data-parallel ranks: use --batch_size 2, or change the number of processes",
        ),
        ({"batch_size": 64, "micro_batch_size": 24}, "use --micro_batch_size 16 or 32"),
    ],
)
def test_the_nearest_sizes_are_named(sizes: dict[str, int], advice: str) -> None:
    with pytest.raises(UsageError, match=f"{advice}$"):
        split_batch(RunConfig(**sizes), Layout(num_processes=2))


@pytest.mark.parametrize(("stage", "text"), [("2", "DeepSpeed ZeRO-2"), ("3", "DeepSpeed ZeRO-3 with CPU offload")])
def test_only_stage_3_offloads_weights(stage: str, text: str) -> None:
    settings = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    settings["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] = "cpu"
    assert str(layout_of(Environment(settings=settings), RunConfig())) == text
