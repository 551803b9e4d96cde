"""Promise: what differs from one process is found, such as a weight that is not a number; what rounding does is not."""

import math

import pytest
import torch
from torch import Tensor

from accelerate_recipes.common.check.compare import replica_gaps, weight_gap
from accelerate_recipes.common.check.noise import without_noise
from accelerate_recipes.common.check.reference import Perturbed, Reference
from accelerate_recipes.common.check.sketch import Sketch
from accelerate_recipes.common.check.trace import Step


def test_a_weight_that_is_not_a_number_differs() -> None:
    start, after = Sketch.of(torch.zeros(3)), Sketch.of(torch.ones(3))
    assert weight_gap("w", Sketch.of(torch.full((3,), math.nan)), after, start).size == math.inf
    assert weight_gap("w", after, after, start).size == 0
    assert weight_gap("w", start, after, start).size == 1 - 2 * torch.finfo(torch.float32).eps


def test_a_part_that_is_not_a_number_in_one_process_differs() -> None:
    steps = [Step(parts={("w", 0): (1.0, 1.0)}), Step(parts={("w", 0): (math.nan, math.nan)})]
    assert replica_gaps(steps, {"w": 1.0})["replica", "w"].size == math.inf
    assert replica_gaps(steps[:1] * 2, {"w": 1.0})["replica", "w"].size == 0


def test_infinities_in_a_mask_are_equal() -> None:
    mask = Sketch.of(torch.tensor([0.0, -math.inf]))
    assert weight_gap("mask", mask, mask, mask).size == 0


def test_sums_of_a_weight_stay_when_it_changes() -> None:
    weight = torch.zeros(3, dtype=torch.float64)
    before = Sketch.of(weight)
    weight += 1
    assert before.norm == 0


@pytest.mark.parametrize("fault", [0, 1e-4])
def test_rounding_of_one_small_gradient_is_noise_and_a_fault_of_all_is_not(fault: float) -> None:
    """Adam divides a gradient by its own size. The perturbed step by chance hardly changes the smallest one."""
    gradient, rounding = torch.randn(2, 768, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    gradient, rounding = 1e-4 * gradient.sign() * (0.1 + gradient.abs()), 2e-9 * rounding
    gradient[0], luck = 7e-9, rounding.clone()
    luck[0] = 1e-11

    def step(gradient: Tensor, factor: float = 1) -> Step:
        weight = torch.zeros_like(gradient, requires_grad=True)
        weight.grad = gradient
        torch.optim.AdamW([weight], lr=1e-4 * factor).step()
        return Step(weights={"bias": Sketch.of(weight)}, gradients={"bias": Sketch.of(gradient)}, grad_norm=1.0)

    zero, one, run = Sketch.of(torch.zeros(768)), step(gradient), step(gradient + rounding.abs(), 1 + fault)
    perturbed = [Perturbed({0: step(gradient + luck)}, {"bias": zero})]
    for each in (one, perturbed[0].steps[0]):
        each.values[0], each.ids[0] = {"loss": torch.ones(1)}, [0]
    gap = weight_gap("bias", run.weights["bias"], one.weights["bias"], zero)
    assert gap.size > 1e-3
    left, lines = without_noise({("weight", "bias"): gap}, Reference({"bias": zero}, {0: one}, perturbed, False), 0)
    assert [gap.size for gap in left.values()] == pytest.approx([fault] * (fault > 0), rel=0.01) and not lines


@pytest.mark.parametrize(("num_measured", "fault", "is_noise"), [(1, 1e-4, True), (1, 1e-3, False), (2, 1e-4, False)])
def test_one_measurement_of_large_weights_counts_for_each(num_measured: int, fault: float, is_noise: bool) -> None:
    """By chance, the perturbed step hardly changes one of four large weights."""
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(0))

    def step(**changes: float) -> Step:
        moved = {name: Sketch.of(1e-4 * (1 + change * noise)) for name, change in changes.items()}
        gradients = {name: Sketch.of(noise * (1 + 1e-5 * bool(change) * noise)) for name, change in changes.items()}
        step = Step(weights=moved, gradients=gradients, grad_norm=1.0)
        step.values[0], step.ids[0] = {"loss": torch.ones(1)}, [0]
        return step

    start, one = {name: Sketch.of(torch.zeros(5000)) for name in "abcd"}, step(a=0, b=0, c=0, d=0)
    perturbed = [Perturbed({0: step(a=1e-6, b=1e-4, c=1e-4, d=1e-4)}, start)] * num_measured
    gap = weight_gap("a", step(a=fault).weights["a"], one.weights["a"], start["a"])
    assert gap.size > 0.5 * fault
    left, lines = without_noise({("weight", "a"): gap}, Reference(start, {0: one}, perturbed, False), 0)
    assert not lines and (left == {}) is is_noise
