"""Promise: each learning-rate schedule has the shape that its name says."""

import pytest
import torch

from accelerate_recipes.common.schedule import SCHEDULES, learning_rate_factor


def test_schedules_rise_and_fall() -> None:
    cosine = [learning_rate_factor("cosine", step, 20, 3) for step in range(21)]
    assert cosine[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and cosine[20] == pytest.approx(0)
    assert learning_rate_factor("linear", 19, 20, 3) == pytest.approx(1 / 17)
    assert {learning_rate_factor("constant", step, 20, 0) for step in range(20)} == {1.0}
    assert [learning_rate_factor("wsd", step, 20, 2) for step in range(20)] == pytest.approx(
        [1 / 3, 2 / 3, *[1] * 15, 3 / 4, 2 / 4, 1 / 4]
    )


def test_one_cycle_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    torch_schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=40, cycle_momentum=False)
    for step in range(40):
        assert learning_rate_factor("one_cycle", step, 40, 0) == pytest.approx(torch_schedule.get_last_lr()[0])
        optimizer.step()
        if step < 39:
            torch_schedule.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (2, 0), (3, 5), (20, 20)])
def test_factor_is_never_zero_nor_above_one(schedule: str, num_steps: int, warmup_steps: int) -> None:
    factors = [learning_rate_factor(schedule, step, num_steps, warmup_steps) for step in range(num_steps)]
    assert all(0 < factor <= 1 for factor in factors)
