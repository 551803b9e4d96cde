"""Promise: a head that knows the classes of the data by name keeps order and weights; any other is new, and said so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification, BertConfig, PvtConfig, ViTConfig, ViTForImageClassification

from accelerate_recipes.common.data.facts import count_by_class
from accelerate_recipes.common.tasks.models.pretrained import load
from accelerate_recipes.common.tasks.reading.labelled import classes_of_model, config_of_classes, names_of, with_classes

Out = pytest.CaptureFixture[str]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def classifier(tmp_path: Path) -> Callable[[list[str] | None], ViTForImageClassification]:
    def make(names: list[str] | None) -> ViTForImageClassification:
        torch.manual_seed(0)
        form = {"id2label": dict(enumerate(names))} if names else {"num_labels": 3}
        model = ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, **SIZES, **form))
        model.save_pretrained(tmp_path)
        return model

    return make


def read(folder: Path, classes: list[str]) -> Any:
    def from_folder(**options: Any) -> Any:
        return load(AutoModelForImageClassification, str(folder), "image classifier", reads=None, **options)

    return with_classes(from_folder, str(folder), classes)[0]


@pytest.mark.parametrize(
    ("names", "classes", "order"),
    [
        (["sad", "glad", "mad"], ["glad", "mad", "sad"], ["sad", "glad", "mad"]),
        (["sad", "glad", "mad"], ["glad", "sad"], ["sad", "glad", "mad"]),
        (["sad", "glad", "mad"], ["glad", "sad", "bad"], None),
        (["Sad", "glad"], ["glad", "sad"], None),
        (["crane", "crane", "cat"], ["crane", "cat"], None),
        (["crane", "crane", "cat", "dog"], ["dog", "cat"], ["crane", "crane", "cat", "dog"]),
        ([str(number) for number in range(12)], ["2", "10"], [str(number) for number in range(12)]),
    ],
)
def test_order_of_the_head(tmp_path: Path, names: list[str], classes: list[str], order: list[str] | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(names))}))
    assert classes_of_model(str(tmp_path), classes) == ((classes, True) if order is None else (order, False))


def test_head_that_knows_the_classes(classifier: Callable[..., Any], tmp_path: Path, capsys: Out) -> None:
    before = classifier(["sad", "glad", "mad"])
    for classes in (["glad", "mad", "sad"], ["glad", "sad"]):
        model = read(tmp_path, classes)
        assert names_of(model.config) == ["sad", "glad", "mad"] and model.config.label2id["mad"] == 2
        assert torch.equal(model.classifier.weight, before.classifier.weight)
    assert "head" not in capsys.readouterr().out


@pytest.mark.parametrize("classes", [["a", "b", "c"], ["0", "1", "2"], ["glad", "sad", "bad"], ["a", "b"]])
def test_head_with_other_names_is_new(
    classifier: Callable[..., Any], tmp_path: Path, classes: list[str], capsys: Out
) -> None:
    before = classifier(["sad", "glad", "mad"])
    model = read(tmp_path, classes)
    assert names_of(model.config) == classes and len(model.classifier.weight) == len(classes)
    assert not torch.equal(model.classifier.weight[:2], before.classifier.weight[:2])
    assert model.classifier.weight.std() < 0.1 and not model.classifier.bias.any()
    for name, weight in before.vit.named_parameters():
        assert torch.equal(model.vit.get_parameter(name), weight)
    line = f"the head is new: the head of {tmp_path} knows sad, glad, mad; the data has {', '.join(classes)} ("
    assert capsys.readouterr().out.count(line) == 1


def test_head_without_names_takes_those_of_the_data(
    classifier: Callable[..., Any], tmp_path: Path, capsys: Out
) -> None:
    before = classifier(None)
    model = read(tmp_path, ["a", "b", "c"])
    assert names_of(model.config) == ["a", "b", "c"] and torch.equal(model.classifier.weight, before.classifier.weight)
    assert len(read(tmp_path, ["a", "b"]).classifier.weight) == 2
    assert "head" not in capsys.readouterr().out


def test_head_whose_names_have_gaps_is_new(classifier: Callable[..., Any], tmp_path: Path, capsys: Out) -> None:
    """Then it is not known which output has which name."""
    before, path = classifier(["neg", "x", "pos"]), tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "neg", "5": "pos", "2": "x"}}))
    for classes in (["neg", "pos"], ["neg", "pos", "x"]):
        model = read(tmp_path, classes)
        assert names_of(model.config) == classes and len(model.classifier.weight) == len(classes)
        assert not torch.equal(model.classifier.weight[:2], before.classifier.weight[:2])
        assert "knows neg as output 0, x as output 2, pos as output 5; the data has neg, " in capsys.readouterr().out


def test_counts_of_classes() -> None:
    assert count_by_class(["b", "a", "c"], [0, 0, 1]) == "3 classes: b 2, a 1, c 0"


@pytest.mark.parametrize("given", [{"problem_type": "multi_label_classification"}, {"problem_type": "regression"}])
def test_the_config_says_what_is_trained(classifier: Callable[..., Any], tmp_path: Path, given: dict[str, str]) -> None:
    classifier(["a", "b"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    config = read(tmp_path, ["a", "b"]).config
    assert (config.problem_type, config.num_labels) == ("single_label_classification", 2)


def test_numbers_of_outputs_without_names(classifier: Callable[..., Any], tmp_path: Path) -> None:
    before = classifier(None)
    model = read(tmp_path, ["0", "2"])  # no sample has class 1
    assert names_of(model.config) == ["0", "1", "2"] and torch.equal(model.classifier.weight, before.classifier.weight)
    for classes in (["7", "5000"], ["0"]):
        assert names_of(read(tmp_path, classes).config) == classes


@pytest.mark.parametrize("classes", [["LABEL_0"], ["cat", "dog"]])
def test_transformers_takes_what_the_config_says_of_classes(classes: list[str]) -> None:
    config = BertConfig(**config_of_classes(classes))
    assert names_of(config) == classes
    assert config.problem_type == (None if len(classes) == 1 else "single_label_classification")


def test_a_config_that_does_not_count_its_classes() -> None:
    assert PvtConfig(**config_of_classes(["cat", "dog"])).num_labels == 2  # 1,000 by itself
