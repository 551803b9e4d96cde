"""Weights of classes in the loss, and their metrics: confusion matrix, F1, ranking of several labels."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ...errors import UsageError
from ..reading.labelled import Labelled, balanced_weights


def class_measures(num_classes: int, examples: dict[str, Tensor]) -> dict[str, float]:
    """For `examples` of `fit`, from "label" and "predicted", each of shape (samples,): the mean of F1 over the classes
    that occur, and Matthews' correlation; for two classes also the F1 of the second one."""
    from sklearn.metrics import f1_score, matthews_corrcoef  # takes 0.8 s

    given = [examples[name].numpy() for name in ("label", "predicted")]
    found = {"macro_f1": f1_score(*given, average="macro"), "matthews": matthews_corrcoef(*given)}
    if num_classes == 2:
        found["f1"] = f1_score(*given, zero_division=0)
    return {name: float(value) for name, value in found.items()}


def measures_of_several(examples: dict[str, Tensor]) -> dict[str, float]:
    """Like `average_precision`, and F1 of probabilities above 0.5, over all answers and as a mean of classes."""
    from sklearn.metrics import f1_score

    given = examples["label"].numpy(), examples["probability"].numpy() > 0.5
    f1 = {f"{name}_f1": float(f1_score(*given, average=name, zero_division=0)) for name in ("micro", "macro")}
    return average_precision(examples) | f1


def average_precision(examples: dict[str, Tensor]) -> dict[str, float]:
    """For `examples` of `fit`: the mean, over the classes that a sample has, of their average precision; from
    "probability" of shape (samples, classes), and "label", 1 where a sample has a class."""
    from sklearn.metrics import average_precision_score  # takes 0.8 s

    occurs = examples["label"].sum(0) > 0
    label, probability = (examples[name][:, occurs].numpy() for name in ("label", "probability"))
    return {"mean_average_precision": float(average_precision_score(label, probability))}


def weights_of_classes(flag: str | None, parts: Sequence[Labelled], are_mixed: bool) -> list[float] | None:
    """The weight of each class in the loss; None without the flag. Raises UsageError.

    Args:
        flag: of `--class_weights`: "balanced" (all classes weigh the same in total), or "cat:2,dog:0.5" (others 1).
        parts: the images for training.
        are_mixed: whether two images are mixed into one.
    """
    if flag is None:
        return None
    if parts[0].has_several or are_mixed:
        what = "images with several classes" if parts[0].has_several else "--mixup and --cutmix"
        raise UsageError(f"--class_weights does not work with {what}: remove it")
    if flag == "balanced":
        return balanced_weights(parts)
    classes = parts[0].classes
    weights = dict.fromkeys(classes, 1.0)
    for word in flag.split(","):
        name, _, number = word.rpartition(":")
        with suppress(ValueError):
            if name in weights and 0 < float(number) < math.inf:
                weights[name] = float(number)
                continue
        advice = f"use balanced, or numbers above 0 such as {classes[0]}:2,{classes[-1]}:0.5"
        raise UsageError(f"--class_weights {flag}: {word} is not a class with a weight: {advice}")
    return [weights[name] for name in classes]


class Confusion:
    """How often each class was predicted as each other one, in the last evaluation."""

    def __init__(self, classes: list[str]):
        self.classes = classes
        self.counts: Tensor | None = None  # (class, predicted class), after an evaluation

    def __call__(self, examples: dict[str, Tensor]) -> dict[str, float]:
        """For `examples` of `fit`: the mean over the classes of the share of their samples that is predicted right."""
        from sklearn.metrics import confusion_matrix, recall_score  # takes 0.8 s

        given = [examples[name].numpy() for name in ("label", "predicted")]
        self.counts = torch.from_numpy(confusion_matrix(*given, labels=range(len(self.classes))))
        return {"balanced_accuracy": float(recall_score(*given, labels=[*{*given[0]}], average="macro"))}

    def write(self, path: Path) -> None:
        """Draws the counts: rows are classes, columns predictions, darker is more. Adds names if there is room."""
        if self.counts is None:  # a run that was already done
            return
        cell = max(2, min(24, 1600 // len(self.classes)))
        has_room, sizes = cell >= 16, self.counts.sum(1).tolist()
        label = 8 * max(map(len, self.classes)) if has_room else 0
        image = Image.new("RGB", (label + cell * len(sizes), cell * len(sizes)), "white")
        draw = ImageDraw.Draw(image)
        for row, name in enumerate(self.classes if has_room else ()):
            draw.text((2, cell * row + cell // 4), name, fill="black")
        for row, column in self.counts.nonzero().tolist():
            count = int(self.counts[row, column])
            left, top, share = label + cell * column, cell * row, count / sizes[row]
            light = round(255 * (1 - share))
            draw.rectangle((left, top, left + cell - 2, top + cell - 2), fill=(light, light, 255))
            if has_room:
                draw.text((left + 2, top + cell // 4), str(count), fill="black" if share < 0.5 else "white")
        image.save(path)
        print(f"{path}: a row for each class, a column for each predicted one")
