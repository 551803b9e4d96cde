"""The sums that are kept of what a module gives: a part of it is found in them, and a distance follows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_recipes.common.check.modules import (
    ModuleTrace,
    block_sums,
    by_sample,
    relative_distances,
    sizes_of_blocks,
)


@pytest.mark.parametrize("shape", [(16, 64), (30, 48), (4, 16, 16), (17,), (10, 3, 8)])
def test_a_distance_follows_from_the_sums(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(64, *shape)
    other = whole + 1e-3 * torch.randn(whole.shape)
    sizes = sizes_of_blocks(shape, 4)
    sums, others = block_sums(whole, sizes), block_sums(other, sizes)
    assert sums is not None and others is not None
    found = relative_distances(others, sums)
    assert found is not None and float(found.mean()) == pytest.approx(1e-3, rel=0.25)
    assert float(relative_distances(sums, sums).max()) == 0


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_is_found_in_the_whole(dim: int, parts: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 12, 20)
    sizes = sizes_of_blocks((12, 20), parts)
    sums = block_sums(whole, sizes)
    for part in whole.chunk(parts, dim):
        own = block_sums(part, sizes)
        assert own is not None and sums is not None and float(relative_distances(own, sums).max()) < 1e-6
        wrong = block_sums(part * 1.1, sizes)
        assert float(relative_distances(wrong, sums).max()) == pytest.approx(0.1, rel=1e-4)


def test_what_is_no_part_is_left_out() -> None:
    sums = block_sums(torch.randn(2, 12, 20), sizes_of_blocks((12, 20), 2))
    assert block_sums(torch.randn(2, 11, 20), sizes_of_blocks((12, 20), 2)) is None  # no whole blocks
    assert relative_distances(torch.zeros(2, 3), sums) is None
    assert relative_distances(torch.zeros(1, *sums.shape[1:]), sums) is None


def test_tokens_in_one_dimension_belong_to_samples() -> None:
    tokens = torch.arange(24.0).view(12, 2)
    assert by_sample(tokens, 4).shape == (4, 3, 2) and by_sample(tokens, 5).shape == (1, 12, 2)
    assert by_sample(torch.ones(4, 2), 4).shape == (4, 2) and by_sample(torch.tensor(1.0), 4).shape == (1,)


class Dropped(torch.autograd.Function):
    """Gives no gradient to its input."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def test_an_output_that_gets_no_gradient_is_left_out() -> None:
    trace, layer = ModuleTrace(parts=2), torch.nn.Linear(3, 4)
    facts: Any = {"row": 0, "plan": SimpleNamespace(micro_batch_size=2), "running_modules": lambda: [("layer", layer)]}
    with trace.watch(SimpleNamespace(**facts)):
        (Dropped.apply(layer(torch.ones(2, 3))).sum() + layer.weight.sum()).backward()
    assert len(trace.forward) == 1 and not trace.backward
