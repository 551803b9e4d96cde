"""Promise: the samples of a step depend only on the seed and the step."""

import torch

from common.config import RunConfig
from common.plan import Plan


def test_seeds_give_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Plan.of(RunConfig(seed=seed), 100, 1, 0).epoch_order(epoch).tolist()

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_plan_starts_at_any_step() -> None:
    plan = Plan.of(RunConfig(batch_size=8, micro_batch_size=2, max_steps=30), 50, 2, 1)
    whole = torch.stack([ids for _, ids in plan.micro_batches()])
    assert whole.shape == (30 * plan.accumulation, 2)
    assert torch.equal(torch.stack([ids for _, ids in plan.micro_batches(13)]), whole[13 * plan.accumulation :])
