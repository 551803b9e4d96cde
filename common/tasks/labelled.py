"""Samples with classes: texts or images, each with one class, or with several."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils.data import Subset


@dataclass(frozen=True)
class Labelled:
    """Samples and their classes.

    Attributes:
        samples: texts; or images that are read one at a time, in mode L or RGB.
        labels: the number of each sample's class; or, in all, the numbers of its classes, a tuple.
        classes: their names.
    """

    samples: Any
    labels: list[Any]
    classes: list[str]

    @classmethod
    def of_names(cls, samples: Any, names: Sequence[Any], classes: list[str] | None = None) -> Self:
        """Makes the labels from the name of each sample's class or classes. Classes are sorted if no order is given."""
        if any(isinstance(name, list | tuple) for name in names):
            names = [name if isinstance(name, list | tuple) else [name] for name in names]
        classes = classes or sorted({*flatten(names)})
        return cls(samples, renumber(names, {name: number for number, name in enumerate(classes)}), classes)

    @property
    def has_several(self) -> bool:
        """Whether a sample has several classes, or none."""
        return isinstance(self.labels[0], tuple)

    def part(self, ids: torch.Tensor) -> "Labelled":
        """The samples of these ids."""
        return Labelled(Subset(self.samples, ids.tolist()), [self.labels[row] for row in ids.tolist()], self.classes)

    def reorder(self, classes: list[str]) -> "Labelled":
        """The same samples with their classes in this order, perhaps among others."""
        return replace(self, labels=renumber(self.labels, [*map(classes.index, self.classes)]), classes=classes)


def flatten(labels: Sequence[Any]) -> list[Any]:
    """The class of each sample; or those of the first sample, then those of the second one, ..."""
    return [one for label in labels for one in (label if isinstance(label, list | tuple) else [label])]


def renumber(labels: Sequence[Any], numbers: Mapping[Any, int] | Sequence[int]) -> list[Any]:
    """The number for the class of each sample; a tuple if there are several."""
    return [
        tuple(numbers[one] for one in label) if isinstance(label, list | tuple) else numbers[label] for label in labels
    ]


def balanced_weights(parts: Sequence[Labelled]) -> list[float]:
    """For each class, the factor that gives all classes the same weight; the mean over the samples is 1."""
    counts = Counter(label for part in parts for label in part.labels)
    mean = counts.total() / len(counts)
    return [mean / counts.get(number, mean) for number in range(len(parts[0].classes))]
