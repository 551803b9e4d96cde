"""Promise: a mixture takes of each source its share, as a function of the seed and the epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.data.mixed import SOURCE, Mixture, by_source, of_sources, without_sources
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.tasks.reading.mixture import Sources, weights_of

SIZES = {"a": 300, "b": 100, "c": 11}
SETS = {name: [{"value": number} for number in range(size)] for name, size in SIZES.items()}
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 0.1}


def epoch(mixture: Mixture, seed: int, number: int) -> list[tuple[str, int]]:
    plan = Plan.of(RunConfig(seed=seed, batch_size=1), Layout(), len(mixture), sampler=mixture.sampler)
    samples = [mixture[index] for index in plan.epoch_order(number).tolist()]
    return [(mixture.names[sample[SOURCE]], sample["value"]) for sample in samples]


def test_an_epoch_has_of_each_source_its_share_and_none_twice() -> None:
    mixture = Mixture(SETS, WEIGHTS)
    epochs = [epoch(mixture, seed, number) for seed in (0, 1) for number in (0, 1)]
    for samples in epochs:
        assert [sum(name == source for name, _ in samples) for source in SIZES] == [200, 100, 10]
        assert len({*samples}) == len(samples) == 310
    assert len({tuple(samples) for samples in epochs}) == 4  # another order in each epoch
    assert len({frozenset(samples) for samples in epochs}) == 4  # and other samples
    assert epoch(mixture, 1, 1) == epochs[3]


def test_with_repeats_an_epoch_has_each_sample() -> None:
    samples = epoch(Mixture(SETS, WEIGHTS, repeats=True), 0, 0)
    counts = [sum(name == source for name, _ in samples) for source in SIZES]
    assert counts == [300, 150, 15]  # b and c come one and a half times, or nearly
    assert {*samples} == {(name, value) for name, size in SIZES.items() for value in range(size)}


def test_an_evaluation_takes_each_sample_once() -> None:
    mixture = Mixture(SETS)
    assert [mixture[index][SOURCE] for index in range(len(mixture))] == [0] * 300 + [1] * 100 + [2] * 11


def test_metrics_of_a_source_are_means_over_its_samples() -> None:
    def forward_step(model: object, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert batch.keys() == {"value", "source"}  # of the samples themselves
        return {"loss": batch["value"] * 2.0, "acc@5": batch["value"] * 1.0, "label": batch["value"]}

    batch = {"value": torch.tensor([1, 2, 3]), "source": ["x", "y", "z"], SOURCE: torch.tensor([0, 1, 0])}
    values = Mixture(SETS).add_source_metrics(forward_step)(None, batch)
    means = of_sources({f"train/{name}": float(value.double().mean()) for name, value in values.items()})
    assert means["train/loss"] == 4 and means["train/loss@a"] == pytest.approx(4) and means["train/loss@b"] == 4
    assert means["train/share@a"] == pytest.approx(2 / 3) and means["train/acc@5@a"] == pytest.approx(2)
    assert not {"train/loss@c", "train/share@c", "train/label@a"} & means.keys()
    assert without_sources(values).keys() == {"loss", "acc@5", "label"}
    del batch[SOURCE]  # a set that is no mixture
    values = Mixture(SETS).add_source_metrics(forward_step)(None, batch)
    assert of_sources({name: float(value.double().mean()) for name, value in values.items()}).keys() == {
        "loss",
        "acc@5",
        "label",
    }


def test_a_mixture_for_training_has_weights_and_an_evaluation_the_same_names() -> None:
    step: Any = None
    with pytest.raises(UsageError, match="a Mixture for training needs weights"):
        by_source(Mixture(SETS), [], step, None)
    with pytest.raises(UsageError, match="the evaluation mixes b, a, the training a, b, c: give both the same names"):
        by_source(Mixture(SETS, WEIGHTS), {"": Mixture({"b": SETS["b"], "a": SETS["a"]})}, step, None)


@pytest.mark.parametrize(
    ("weights", "sizes", "line"),
    [
        ({"a": 1, "b": 1}, {"a": 3, "b": 0}, "b is empty: remove it from the mixture"),
        ({"a": 1, "b@5": 1}, {"a": 3, "b@5": 3}, "a source has the name b@5: remove @ and /"),
        ({"a": 1000, "b": 1}, {"a": 300, "b": 300}, "b gets less than one sample per epoch: use a larger"),
    ],
)
def test_sources_that_cannot_be_mixed(weights: dict[str, float], sizes: dict[str, int], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        Mixture({name: [{}] * size for name, size in sizes.items()}, weights)


def test_data_names_sources_and_weights(tmp_path: Path) -> None:
    assert weights_of("digits") is weights_of("org/name") is weights_of("a.jsonl") is weights_of("C:/a") is None
    assert weights_of("a.jsonl:3,path/b.csv:0.5") == {"a.jsonl": 3.0, "path/b.csv": 0.5}
    assert weights_of("a.jsonl:3, b.jsonl:1") == {"a.jsonl": 3.0, "b.jsonl": 1.0}
    with pytest.raises(UsageError, match="has no weight: use a number after a colon"):
        weights_of("a.jsonl:3,b.jsonl")
    (tmp_path / "mix.yaml").write_text("a b, c.jsonl: 3\norg/name: 1\n")
    assert weights_of(str(tmp_path / "mix.yaml")) == {"a b, c.jsonl": 3.0, "org/name": 1.0}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("a.jsonl: 3\nb.jsonl: none\n", "b.jsonl has the weight none: expected a number above 0"),
        ("a.jsonl: 3\nb.jsonl: -1\n", "b.jsonl has the weight -1: expected a number above 0"),
        ("a.jsonl: 3\n", "expected two sources or more: use one source and its weight per line"),
        ("[1, 2", "cannot be read .no YAML.: use one source and its weight per line, such as chats.jsonl: 3"),
        (None, "cannot be read .No such file or directory.: use one source"),
    ],
)
def test_weights_that_are_none(tmp_path: Path, content: str | None, line: str) -> None:
    if content is not None:
        (tmp_path / "mix.yaml").write_text(content)
    with pytest.raises(UsageError, match=line):
        weights_of(str(tmp_path / "mix.yaml"))


@pytest.mark.parametrize("data", ["a.jsonl:0,b.jsonl:1", "a.jsonl:1,b.jsonl:1.2.3"])
def test_weights_on_the_command_line_that_are_none(data: str) -> None:
    with pytest.raises(UsageError, match="expected a number above 0"):
        weights_of(data)


def test_a_source_twice() -> None:
    with pytest.raises(UsageError, match="lists a source twice"):
        weights_of("a.jsonl:1,a.jsonl:2")


def test_sources_have_short_names_where_these_differ() -> None:
    def names(data: str) -> list[str]:
        return list(Sources(RunConfig(data=data), lambda data: (data, data)).parts)

    assert names("x/a.jsonl:1,x/b.jsonl:1") == ["a", "b"]
    assert names("x/a.jsonl:1,y/a.jsonl:1") == ["x_a.jsonl", "y_a.jsonl"]
    assert names("x/a.jsonl") == ["a"]
