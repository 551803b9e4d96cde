"""Samples with classes, one or several each; and the classes that a pretrained head knows by name."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Self

import torch
from torch import nn
from torch.utils.data import Subset

from ...data.facts import count_by_class, printable, say, shorten
from ...errors import UsageError

NO_CLASS = {"-1", "-100"}  # in data sets with a part that has no classes
MANY = 20  # classes: from this number on, each needs two samples


@dataclass(frozen=True)
class Labelled:
    """Samples and their classes."""

    samples: Any  # texts; or images that are read one at a time, in mode L or RGB
    labels: list[Any]  # the number of each sample's class; or, in all, the numbers of its classes, a tuple
    classes: list[str]  # their names

    @classmethod
    def of_names(cls, samples: Any, names: Sequence[Any], classes: list[str] | None = None) -> Self:
        """Makes the labels from the name of each sample's class or classes. Without `classes` they are `in_order`."""
        if any(isinstance(name, list | tuple) for name in names):
            names = [name if isinstance(name, list | tuple) else [name] for name in names]
            if {*flatten(names)} <= {"0", "1", "0.0", "1.0"} and len({*map(len, names)}) == 1 < len(names[0]):
                raise UsageError("the classes are lists of 0 and 1: expected lists with the names of the classes")
            names = [[*dict.fromkeys(name)] for name in names]
        classes = classes or in_order(flatten(names))
        return cls(samples, renumber(names, {name: number for number, name in enumerate(classes)}), classes)

    @property
    def has_several(self) -> bool:
        """Whether a sample has several classes, or none."""
        return isinstance(self.labels[0], tuple)

    def target(self, index: int) -> Any:
        """The label of a sample; if it may have several, float32 of shape (classes,), 1 for each that it has."""
        label = self.labels[index]
        if not isinstance(label, tuple):
            return label
        return torch.zeros(len(self.classes)).index_fill_(0, torch.tensor(label, dtype=torch.int64), 1)

    def part(self, ids: torch.Tensor) -> "Labelled":
        """The samples of these ids."""
        return Labelled(Subset(self.samples, ids.tolist()), [self.labels[row] for row in ids.tolist()], self.classes)

    def reorder(self, classes: list[str]) -> "Labelled":
        """The same samples with their classes in this order, perhaps among others."""
        return replace(self, labels=renumber(self.labels, [*map(classes.index, self.classes)]), classes=classes)


def in_order(names: Iterable[str]) -> list[str]:
    """The different names, by their numbers if all are numbers, so that 10 comes after 2; otherwise as texts."""
    texts = sorted({*names})
    numbers = [_number(name) for name in texts]
    return texts if None in numbers else [name for _, name in sorted(zip(numbers, texts))]


def _number(name: str) -> Decimal | None:
    try:
        number = Decimal(name)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def with_same_classes(data: str, parts: Sequence[Labelled], what: str) -> list[Labelled]:
    """The parts with the classes of all. Raises UsageError if nearly every sample has its own. `what`: text, image."""
    used = {part.classes[one] for part in (parts[0], parts[-1]) for one in flatten(part.labels)}
    own, size = parts[0].classes, sum(len(part.labels) for part in parts)
    if len({*parts[0].labels}) < 2 and not parts[0].has_several:
        advice = "such as a sub-folder for each; from a table, --max_samples takes the first rows"
        if len(used) > 1:
            advice = f"even without the evaluation's {len(parts[-1].labels)} of {size}: add {what}s, or a larger "
            advice += "--max_samples, which takes the first rows"
        line = f"--data {data} has {what}s of one class, {own[parts[0].labels[0]]}"
        raise UsageError(f"{line}: expected two or more, {advice}")
    if len(used) > max(MANY, size / 2):
        names = shorten(in_order(used))
        raise UsageError(
            f"--data {data}: {size:,} {what}s have {len(used):,} classes ({names}): expected several {what}s of each"
        )
    classes = [*dict.fromkeys(name for part in parts for name in part.classes)]
    classes = in_order(classes) if own == in_order(own) else classes
    return [part.reorder(classes) for part in parts]


def check_differ(data: Any, values: Iterable[Any], what: str) -> None:
    """Raises UsageError if all values are equal: then there is nothing to learn, or to measure."""
    if len(found := {*values}) == 1:
        value = printable(str(found.pop())[:80])
        raise UsageError(f"--data {data}: all {what} are the same ({value}): expected different ones")


def say_classes(data: str, parts: Sequence[Labelled], what: str, before: str = "", after: str = "") -> None:
    """Prints the size of each class, and likely mistakes: classes that training lacks, look alike, or may mean none."""
    classes, labels = parts[0].classes, flatten([label for part in parts for label in part.labels])
    say(f"--data {data}: {before}{count_by_class(classes, labels)}{after}")
    trained, evaluated = ({classes[one] for one in flatten(part.labels)} for part in (parts[0], parts[-1]))
    alike: dict[Any, list[str]] = {}
    for name in classes:
        plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        alike.setdefault(plain if (number := _number(plain)) is None else number, []).append(name)
    for line, found in {
        f"classes in the evaluation, but in no {what} for training": [n for n in classes if n in evaluated - trained],
        "classes that look alike, but count as different": [
            " and ".join(map(ascii, names)) for names in alike.values() if len(names) > 1
        ],
        "counts as a class, although it may mean no class": sorted(NO_CLASS & (trained | evaluated)),
    }.items():
        if found:
            say(f"--data {data}: {line}: {shorten(found)}")


def flatten(labels: Sequence[Any]) -> list[Any]:
    """The class of each sample; or all classes of the first sample, then of the second, ..."""
    return [one for label in labels for one in (label if isinstance(label, list | tuple) else [label])]


def renumber(labels: Sequence[Any], numbers: Mapping[Any, int] | Sequence[int]) -> list[Any]:
    """The number for the class of each sample; a tuple if there are several."""
    return [tuple(numbers[one] for one in each) if isinstance(each, list | tuple) else numbers[each] for each in labels]


def balanced_weights(parts: Sequence[Labelled]) -> list[float]:
    """For each class, the factor that gives all classes the same weight; the mean over the samples is 1."""
    counts = Counter(label for part in parts for label in part.labels)
    mean = counts.total() / len(counts)
    return [mean / counts.get(number, mean) for number in range(len(parts[0].classes))]


def names_of(config: Any) -> list[str]:
    """The names of the outputs in the config of a model of transformers."""
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def config_of_classes(classes: list[str]) -> dict[str, Any]:
    """The entries for these classes in a transformers model's config, for `from_pretrained`: PVT's does not count."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    problem = "single_label_classification" if len(classes) > 1 else None  # transformers refuses it for one output
    # The files may have another problem type, which pipelines follow.
    return names | {"num_labels": len(classes), "problem_type": problem}


def classes_of_model(name_or_path: str, classes: list[str]) -> tuple[list[str], bool]:
    """The classes in the order of the head that a pretrained model gets, and whether this head must be new.

    A head that knows each class by one name keeps its order and weights. A head without names (LABEL_0, ...) takes the
    classes in the order of the data; if these are numbers of most of its outputs, it takes all numbers. Any other head
    would give its outputs other names: then the head is new, and the run says so.
    """
    from transformers import PretrainedConfig

    try:
        found = PretrainedConfig.get_config_dict(name_or_path)[0]  # runs no code of the model
        config = PretrainedConfig(**{name: found[name] for name in ("id2label", "num_labels") if found.get(name)})
    except Exception:  # the library raises dozens of types; loading the model says what is wrong
        return classes, False
    names = names_of(config)
    if (keys := sorted(config.id2label)) != [*range(len(names))]:  # it is not known which output has which name
        names = [f"{name} as output {key}" for key, name in zip(keys, names)]
    if all(names.count(name) == 1 for name in classes):
        return names, False
    if all(name == f"LABEL_{number}" for number, name in enumerate(names)):
        numbers = [*map(str, range(len(names)))]
        if not ({*classes} < {*numbers} and 2 * len(classes) > len(names)):
            return classes, False
        say(f"the outputs of {name_or_path} have no names: they count as the classes 0 to {numbers[-1]}")
        return numbers, False
    what = f"the head is new: the head of {name_or_path} knows {shorten(names)}; the data has {shorten(classes)}"
    say(f"{what} (a head keeps its weights if it knows all classes of the data by name)")
    return classes, True


def with_classes(read: Callable[..., Any], name_or_path: str, classes: list[str]) -> Any:
    """Loads a pretrained classifier for the classes of the data by `read`, which takes options of `from_pretrained` and
    returns the model first. Then `names_of(model.config)` has the order of the classes."""
    order, is_new = classes_of_model(name_or_path, classes)
    found = read(**config_of_classes(order))
    if is_new:
        renew_head(found[0])
    return found


@torch.no_grad()
def renew_head(model: Any) -> None:
    """Gives the layer with an output for each class random weights, as transformers does for a head of another size.
    A detector's layer has one more output, for no object; it is not the layer of the boxes."""
    rows = model.config.num_labels + hasattr(model.config, "bbox_cost")
    for name, weight in model.named_parameters():
        is_inside = name.startswith(f"{model.base_model_prefix}.") or "bbox" in name
        if not is_inside and weight.shape[:1] == (rows,):
            if weight.ndim > 1:
                nn.init.normal_(weight, std=getattr(model.config, "initializer_range", 0.02))
            else:
                nn.init.zeros_(weight)
