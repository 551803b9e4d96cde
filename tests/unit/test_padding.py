"""Promise: `pad_to_longest` makes batches of samples with different lengths."""

import pickle

import torch

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.data import pad_to_longest
from accelerate_recipes.common.data.batches import batches
from accelerate_recipes.common.data.sets import Collated

SAMPLES = [
    {"tokens": torch.tensor([5, 6, 7]), "labels": torch.tensor([1, 2, 3]), "score": 0.5, "name": "a"},
    {"tokens": torch.tensor([8]), "labels": torch.tensor([4]), "score": 1.5, "name": "b"},
]


def test_pads_to_the_longest_and_adds_a_mask() -> None:
    batch = pad_to_longest({"labels": -100})(SAMPLES)
    assert batch["tokens"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["score"].tolist() == [0.5, 1.5] and batch["name"] == ["a", "b"]


def test_pads_to_a_multiple_and_keeps_other_dimensions() -> None:
    samples = [{"x": torch.ones(2, 3)}, {"x": torch.ones(5, 3)}]
    batch = pad_to_longest(mask=None, multiple_of=4)(samples)
    assert batch.keys() == {"x"} and batch["x"].shape == (2, 8, 3) and batch["x"].sum() == 21


def test_workers_that_are_not_forks_get_it() -> None:
    """They are the default on macOS, on Windows, and from Python 3.14 on."""
    collate = pickle.loads(pickle.dumps(pad_to_longest({"labels": -100})))
    assert collate(SAMPLES)["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_a_dataset_with_a_function_of_its_own() -> None:
    dataset = Collated(SAMPLES, pad_to_longest())  # type: ignore[arg-type]  # a list is a map-style dataset, too
    (batch,) = batches(dataset, [(0, torch.tensor([1, 0]))], torch.device("cpu"), RunConfig())
    assert batch["tokens"].tolist() == [[8, 0, 0], [5, 6, 7]]
