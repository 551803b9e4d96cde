"""Promise: two runs are the same if their values and weights are, or if rounding errors move one process as far."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate_recipes.common.check.sketch import Sketch
from accelerate_recipes.common.check.tolerances import RECORD
from accelerate_recipes.common.weights.on_disk import WeightFiles
from accelerate_recipes.verify.differences import (
    Trace,
    compare,
    compared,
    distances,
    noise_floor,
    of_all_steps,
)

LARGE = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def trace(losses: tuple[float, ...], weight: float = 1.0, bias: float = 1.0, **values: object) -> Trace:
    found = {(step, "train/loss"): loss for step, loss in enumerate(losses, 1)}
    found |= {(1, name): value for name, value in values.items()}
    return Trace(found, {"weight": LARGE * weight, "bias": torch.tensor([bias])})


ONE = trace((1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("other", "first_step", "tensor"),
    [
        (trace((1.0, 1.0001, 1.0)), 2, None),
        (trace((1.0, 1.0, math.nan)), 3, None),
        (trace((1.0, 1.0)), 3, None),
        (trace((1.0, 1.0, 1.0, 1.0)), 4, None),
        (trace((1.0, 1.0, 1.0), samples=[1, 2]), 1, None),
        (trace((1.0, 1.0, 1.0), learning_rate=0.1), 1, None),
        (trace((1.0, 1.0, 1.0), grad_norm=1.0), None, None),
        (trace((1.0, 1.0, 1.0), weight=1.0001), None, "weight"),
        (replace(ONE, weights={"weight": LARGE}), None, "bias"),
        (replace(ONE, weights={**ONE.weights, "bias": torch.ones(1).double()}), None, "bias"),
        (replace(ONE, weights={**ONE.weights, "bias": torch.ones(1, 1)}), None, "bias"),
    ],
)
def test_what_differs_is_named(other: Trace, first_step: int | None, tensor: str | None) -> None:
    difference = compare(other, ONE)
    assert not difference.is_same and (difference.first_step, difference.tensor) == (first_step, tensor)
    assert compare(ONE, ONE).is_exact and compare(ONE, ONE).is_same


def test_rounding_explains_ten_times_what_it_moves_and_only_later() -> None:
    floor = noise_floor(trace((1.0, 1.00001, 1.0001), bias=1.1), ONE)
    same = compare(trace((1.0, 1.00005, 1.0005), bias=1.5), ONE, floor)
    assert same.is_same and same.is_noise and not compare(trace((1.0, 1.00005, 1.0005), bias=1.5), ONE).is_same
    assert compare(trace((1.0, 1.0002, 1.0)), ONE, floor).first_step == 2
    assert compare(trace((1.0, 1.0, 1.0), weight=1.001), ONE, floor).tensor == "weight"
    assert compare(trace((1.0, 1.0002, 1.0), weight=1.001), ONE, of_all_steps(floor)).is_same
    assert compare(trace((1.0001, 1.0, 1.0)), ONE, of_all_steps(floor)).first_step == 1
    assert noise_floor(trace((1.0001, 1.1, 1.1)), ONE) == {}


def test_weights_of_any_type_are_read_one_by_one_and_equal_only_to_the_last_bit(tmp_path: Path) -> None:
    weights = {"whole": torch.tensor([2**60]), "mask": torch.tensor([-math.inf, 0.0]), "phase": torch.ones(2) * 1j}
    save_file(weights, tmp_path / "model.safetensors")
    read = WeightFiles(tmp_path.glob("*.safetensors"))
    assert len(read) == 3 and distances(read, weights) == dict.fromkeys(weights, 0.0)
    changed = {"whole": torch.tensor([2**60 + 1]), "mask": torch.tensor([0.0, 0.0]), "phase": torch.ones(2) * 1.5j}
    assert all(size > 0 for size in distances(read, changed).values())


def test_a_record_keeps_sums_of_each_weight() -> None:
    then = json.loads(json.dumps(ONE.to_record(with_weights=True)))
    assert len(then["weights"]["weight"]) == 16 and len(then["weights"]["bias"]) == 1
    again, moved = (Trace.of_record(each.to_record(with_weights=True)) for each in (ONE, trace((1, 1, 1), weight=1.01)))
    assert compare(again, Trace.of_record(then), tolerances=RECORD).is_exact
    sizes = {one.name: one.size for one in compared(moved, Trace.of_record(then), tolerances=RECORD)}
    assert sizes["bias"] == 0 and sizes["weight"] == pytest.approx(0.01, rel=1e-5)
    assert not Trace.of_record(then | {"sketch": "another"}).weights


@pytest.mark.parametrize("width", [16, 4096])
def test_the_sums_follow_how_far_a_part_of_a_weight_moves(width: int) -> None:
    values, other = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(1)).unbind()
    other[1000:] = values[1000:]
    expected = float((other - values).norm())
    assert (Sketch.of(other, width) - Sketch.of(values, width)).norm == pytest.approx(expected, rel=0.5)
