"""Matches the classes of the data with the class names of a pretrained head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..data.facts import say, shorten


def names_of(config: Any) -> list[str]:
    """The names of the outputs in the config of a model of transformers."""
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def config_of_classes(classes: list[str]) -> dict[str, Any]:
    """What the config of a model of transformers says of these classes, for `from_pretrained`."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    return names | {"problem_type": "single_label_classification"}  # the files may have another, which pipelines follow


def classes_of_model(name_or_path: str, classes: list[str]) -> tuple[list[str], bool]:
    """The classes in the order of the head that a pretrained model gets, and whether this head must be new.

    A head that knows each class by one name keeps its order and its weights. One without names (LABEL_0, ...) takes the
    classes in the order of the data; if these are numbers of most of its outputs, it takes all numbers. Any other
    would give its outputs other names: it is new, and a line says so.
    """
    from transformers import PretrainedConfig

    try:
        found = PretrainedConfig.get_config_dict(name_or_path)[0]  # runs no code of the model
        config = PretrainedConfig(**{name: found[name] for name in ("id2label", "num_labels") if found.get(name)})
    except Exception:  # the library raises dozens of types; loading the model says what is wrong
        return classes, False
    names = names_of(config)
    if all(names.count(name) == 1 for name in classes):
        return names, False
    if all(name == f"LABEL_{number}" for number, name in enumerate(names)):
        numbers = [*map(str, range(len(names)))]
        if not ({*classes} < {*numbers} and 2 * len(classes) > len(names)):
            return classes, False
        say(f"the outputs of {name_or_path} have no names: they are taken for the classes 0 to {numbers[-1]}")
        return numbers, False
    say(
        f"the head is new: that of {name_or_path} knows {shorten(names)}; the data has {shorten(classes)} (a head "
        "keeps its weights if it knows all classes of the data by name)"
    )
    return classes, True


def with_classes(read: Callable[..., Any], name_or_path: str, classes: list[str]) -> Any:
    """Loads a pretrained classifier for the classes of the data; `names_of(model.config)` has their order afterwards.

    Args:
        read: takes options for `from_pretrained`, and returns the model first.
        name_or_path: folder or Hub id.
        classes: names of the classes in the data.

    Returns:
        what `read` returned.
    """
    order, is_new = classes_of_model(name_or_path, classes)
    found = read(**config_of_classes(order))
    if is_new:
        renew_head(found[0])
    return found


@torch.no_grad()
def renew_head(model: Any) -> None:
    """Gives the layer with an output for each class random weights, as transformers does for a head of another size."""
    for name, weight in model.named_parameters():
        if not name.startswith(f"{model.base_model_prefix}.") and weight.shape[:1] == (model.config.num_labels,):
            if weight.ndim > 1:
                nn.init.normal_(weight, std=getattr(model.config, "initializer_range", 0.02))
            else:
                nn.init.zeros_(weight)
