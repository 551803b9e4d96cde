"""Texts with a class each: embedded, in a file, or on the Hub."""

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ..data.facts import say
from ..errors import UsageError
from .lists import count_by_class
from .rows import Table, rows_with_text
from .sources import hold_out, load_tables

# Packages that every Python has, without parts that a distribution may leave out.
PACKAGES = ("asyncio", "email", "logging", "multiprocessing", "unittest")
LINES_PER_TEXT = 4
HELD_OUT = 5  # one text in so many is for evaluation, if the source has no evaluation part
ADVICE = "use --data stdlib for the embedded texts, or the path of a .csv, .jsonl or .parquet file"


@dataclass
class LabelledTexts:
    """Texts and their classes.

    Attributes:
        texts: the texts.
        labels: the position of each text's class in `classes`.
        classes: names of the classes.
    """

    texts: list[str]
    labels: list[int]
    classes: list[str]

    @classmethod
    def join(cls, parts: "Iterable[LabelledTexts]") -> "LabelledTexts":
        """The texts of several parts with the same classes."""
        texts, labels, classes = zip(*((part.texts, part.labels, part.classes) for part in parts))
        return cls(list(chain.from_iterable(texts)), list(chain.from_iterable(labels)), classes[0])

    def reorder(self, classes: list[str]) -> "LabelledTexts":
        """The same texts with their classes in this order, perhaps among others."""
        numbers = [classes.index(name) for name in self.classes]
        return LabelledTexts(self.texts, [numbers[label] for label in self.labels], classes)

    def weights(self) -> list[float]:
        """For each class, the factor that gives all classes the same weight; the mean over the texts is 1."""
        counts = torch.bincount(torch.tensor(self.labels), minlength=len(self.classes)).clamp(min=1)
        return (len(self.labels) / len(self.classes) / counts).tolist()


class EncodedTexts(Dataset):
    """Samples {"input_ids": int64 of shape (length,), "label": int, "class_weight": float}.

    Args:
        source: the texts.
        tokenizer: a tokenizer of transformers.
        max_length: tokens beyond this number are left out.
        class_weights: how much a text of each class counts in the loss.
    """

    def __init__(self, source: LabelledTexts, tokenizer: Any, max_length: int, class_weights: list[float]):
        encoded = tokenizer(source.texts, truncation=True, max_length=max_length)["input_ids"]
        kept = [row for row, tokens in enumerate(encoded) if tokens]
        if len(kept) < len(encoded):
            say(f"{len(encoded) - len(kept):,} of {len(encoded):,} texts have no token: left out")
        self.tokens, self.labels = [torch.tensor(encoded[row]) for row in kept], [source.labels[row] for row in kept]
        self.class_weights = class_weights

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = self.labels[index]
        return {"input_ids": self.tokens[index], "label": label, "class_weight": self.class_weights[label]}


def load_labelled_texts(
    data: str, text_column: str = "text", label_column: str = "label"
) -> tuple[LabelledTexts, LabelledTexts]:
    """Loads texts with their classes.

    Args:
        data: "stdlib" (lines of Python's standard library; the class is the package); or what `load_tables` takes.
        text_column: name of the column with the texts.
        label_column: name of the column with the classes.

    Returns:
        (training texts, evaluation texts). If the source has only one part, one text in five is held out.

    Raises:
        UsageError: no data, no such column, an empty part, or fewer than two classes.
    """
    declared: list[str] = []
    if data == "stdlib":
        parts = [_standard_library()]
    else:
        tables = load_tables(data, ADVICE)
        parts = [_rows(table, text_column, label_column) for table in tables]
        declared = getattr(tables[0].kinds.get(label_column), "names", declared)
    train, evaluation = parts if len(parts) == 2 else _split(parts[0])
    classes = declared or sorted({label for part in (train, evaluation) for _, label in part})
    if len(classes) < 2 or not train or not evaluation:
        raise UsageError(
            f"--data {data} has {len(train)} training and {len(evaluation)} evaluation texts of {len(classes)} "
            "classes: expected both, and two or more classes"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    first, second = (
        LabelledTexts([text for text, _ in part], [numbers[label] for _, label in part], classes)
        for part in (train, evaluation)
    )
    say(f"--data {data}: {count_by_class(classes, first.labels + second.labels)}")
    return first, second


def _split(rows: list[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    train, evaluation = ([rows[number] for number in ids.sort().values] for ids in hold_out(len(rows), HELD_OUT))
    return train, evaluation


def _standard_library() -> list[tuple[str, ...]]:
    """Consecutive lines of code, and the package that they are from."""
    folder, rows = Path(sysconfig.get_path("stdlib")), list[tuple[str, ...]]()
    for package in PACKAGES:
        for path in sorted((folder / package).glob("*.py")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            starts = range(0, len(lines) - LINES_PER_TEXT + 1, LINES_PER_TEXT)
            rows += [("\n".join(lines[start : start + LINES_PER_TEXT]), package) for start in starts]
    return rows


def _rows(table: Table, text_column: str, label_column: str) -> list[tuple[str, ...]]:
    """(text, name of its class) of each row that has a text. Raises UsageError for one without a class."""
    table.check_columns({"--text_column": text_column, "--label_column": label_column})
    for row, label in enumerate(table.texts(label_column), start=1):
        if not (label and label.strip()):
            raise UsageError(
                f"--data {table.name}: row {row} has no class in column {label_column}: remove the row or fill it"
            )
    return rows_with_text(table, text_column, label_column)
