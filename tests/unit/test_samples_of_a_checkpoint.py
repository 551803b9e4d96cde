"""What a run's data are: the same samples are known again, others are found."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig
from accelerate_recipes.common.checkpoint.identity import Facts, _facts, known_by, other_sample
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.seeds import CPU, generator_states

CONFIG = {"epochs": 1, "batch_size": 8, "learning_rate": 1.0}


class Rows(Dataset):
    """Eighty samples, each of which `change` alters: (sample, index) -> sample."""

    def __init__(self, change: Callable[[dict[str, Any], int], Any] = lambda sample, index: sample):
        generator = torch.Generator().manual_seed(0)
        self.x, self.ids = torch.randn(80, 40, generator=generator), torch.randint(50, (80, 6), generator=generator)
        self.change = change

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        return self.change({"x": self.x[index], "ids": self.ids[index], "name": f"row {index}"}, index)


def facts_of(dataset: Dataset, **flags: Any) -> Facts:
    plan = Plan.of(RunConfig(**(CONFIG | flags)), Layout(), 80)
    facts = _facts(dataset, known_by(plan), plan.config)
    return json.loads(json.dumps(facts))  # as a checkpoint holds them


def noisy(sample: dict[str, Any], index: int) -> dict[str, Any]:
    return sample | {"x": sample["x"] + random.random() + float(numpy.random.rand()) + torch.rand(40)}


def last_id(sample: dict[str, Any], index: int) -> dict[str, Any]:
    return sample | {"ids": torch.cat([sample["ids"][:-1], sample["ids"][-1:] + 1])}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (last_id, "ids"),
        (lambda sample, index: sample | {"name": f"row {79 - index}"}, "name"),
        (lambda sample, index: sample | {"x": sample["x"].flip(0)}, "x"),
        (lambda sample, index: sample | {"x": sample["x"] * 1.01}, "x"),
        (lambda sample, index: sample | {"x": sample["x"][:39]}, "x"),
        (lambda sample, index: sample | {"ids": sample["ids"].view(2, 3)}, "ids"),
        (lambda sample, index: sample | {"weight": 1.0}, "weight"),
        (noisy, "x"),
    ],
)
def test_other_samples_are_found(change: Any, name: str) -> None:
    assert other_sample(facts_of(Rows(change)), facts_of(Rows())) == ("0", name)


def test_other_order_is_found() -> None:
    rows = Rows()
    rows.x, rows.ids = rows.x.flip(0), rows.ids.flip(0)
    assert other_sample(facts_of(rows), facts_of(Rows())) == ("0", "ids")


@pytest.mark.parametrize(
    "change",
    [
        lambda sample, index: sample | {"x": sample["x"] * (1 + 1e-6)},  # another processor rounds in another way
        lambda sample, index: sample | {"ids": sample["ids"].int()},
    ],
)
def test_rounding_is_not_other_data(change: Any) -> None:
    assert other_sample(facts_of(Rows(change)), facts_of(Rows())) is None


def test_values_that_are_no_numbers_are_the_same_again() -> None:
    rows = Rows(lambda sample, index: sample | {"x": sample["x"].where(sample["x"] > 0, torch.nan)})
    assert other_sample(facts_of(rows), facts_of(rows)) is None


def test_random_transforms_draw_the_same_again_and_leave_the_generators() -> None:
    before = generator_states(CPU)
    facts = facts_of(Rows(noisy))
    assert generator_states(CPU) == before and other_sample(facts, facts_of(Rows(noisy))) is None
    assert other_sample(facts, facts_of(Rows(noisy), seed=1)) is not None


def test_samples_that_nobody_can_repeat_are_left_out_of_a_resume() -> None:
    rows, count = Rows(), iter(range(1000))
    rows.change = lambda sample, index: sample | ({"x": torch.tensor(float(next(count)))} if index < 40 else {})
    assert set(facts_of(rows, resume_from_checkpoint="latest")) == {str(index) for index in range(40, 80, 5)}


def test_sample_that_cannot_be_read_is_left_to_the_step_that_needs_it() -> None:
    def broken(sample: dict[str, Any], index: int) -> dict[str, Any]:
        if index == 20:
            raise OSError("broken image")
        return sample

    facts = facts_of(Rows(broken))
    assert set(facts) == {"0", "5", "10", "15"} and other_sample(facts, facts_of(Rows())) is None
