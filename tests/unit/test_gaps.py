"""Promise: a weight that is not a number under a config differs from one that is; a mask of infinities does not."""

import math

import torch

from accelerate_recipes.common.check.compare import replica_gaps, weight_gap
from accelerate_recipes.common.check.reference_run import Step
from accelerate_recipes.common.check.sketch import Sketch


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
