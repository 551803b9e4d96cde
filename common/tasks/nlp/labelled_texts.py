"""Texts, or pairs of them, with classes or numbers: embedded, in a file, or on the Hub."""

from dataclasses import replace
from typing import Any

import torch

from ...data.sets import ListDataset
from ...errors import UsageError
from ..models.tokenization import rows_with_tokens
from ..reading.labelled import Labelled, check_differ, flatten, say_classes, with_same_classes
from ..reading.rows import Table, rows_with_text
from ..reading.sources import STDLIB, divide, load_tables

# Packages that every Python has, without parts that a distribution may leave out.
PACKAGES = ("asyncio", "email", "logging", "multiprocessing", "unittest")
LINES_PER_TEXT = 4
NUMBERS = ("number", "probability")  # of --target
ADVICE = "use --data stdlib for the embedded texts, or the path of a .csv, .jsonl or .parquet file"


class EncodedTexts(ListDataset):
    """Samples {"input_ids": int64 of shape (length,), "label": int}; for pairs of texts with the tokenizer's
    "token_type_ids"; with weights of classes, "class_weight": float.

    The label is a float32 tensor: 0-dim for a number; of shape (classes,) for a text with several classes, 1 for each.

    Args:
        source: the texts.
        tokenizer: a transformers tokenizer.
        max_length: tokens beyond this number are left out, of the longer text of a pair first.
        class_weights: how much a text of each class counts in the loss.
    """

    def __init__(self, source: Labelled, tokenizer: Any, max_length: int, class_weights: list[float] | None = None):
        pairs = isinstance(source.samples[0], tuple)
        columns = [[*column] for column in zip(*source.samples)] if pairs else [[*source.samples]]
        encoded = tokenizer(*columns, truncation=True, max_length=max_length)
        kept = rows_with_tokens(encoded)
        names = ["input_ids", "token_type_ids"] if pairs and "token_type_ids" in encoded else ["input_ids"]
        self.samples = [{name: torch.tensor(encoded[name][row]) for name in names} for row in kept]
        self.labels = replace(source, samples=(), labels=[source.labels[row] for row in kept])
        self.class_weights = class_weights

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = self.labels.target(index)
        weight = {} if self.class_weights is None else {"class_weight": self.class_weights[label]}
        return self.samples[index] | {"label": torch.tensor(label) if isinstance(label, float) else label} | weight


def load_labelled_texts(
    data: str,
    text_column: str = "text",
    label_column: str = "label",
    second_column: str | None = None,
    target: str = "class",
) -> tuple[Labelled, Labelled]:
    """(training texts, evaluation texts), or pairs of texts (tuples), with their classes or numbers. Numbers have the
    one class "LABEL_0", as in transformers. If there is one part, one text in five is held out. Raises UsageError.

    Args:
        data: "stdlib" (lines of Python's standard library; the class is the package); or what `load_tables` takes.
        text_column: name of the column with the texts.
        label_column: name of the column with the classes or numbers.
        second_column: name of the column with the second text of each pair.
        target: "class"; "classes", a list of them or a text with commas; "number"; or "probability", from 0 to 1.
    """
    declared: list[str] = []
    parts: list[Any] = []  # of (text, perhaps the second one, its class, classes or number)
    if data == "stdlib":
        if second_column or target != "class":
            raise UsageError("--data stdlib has single texts with one class each: use the path of a file for others")
        parts = [_standard_library()]
    else:
        tables = load_tables(data, ADVICE, is_labelled=lambda table: table.has_classes(label_column))
        columns = [text_column] if second_column is None else [text_column, second_column]
        for table in tables:
            flags = dict(zip(("--text_column", "--second_text_column"), columns))
            table.check_columns(flags | {"--label_column": label_column})
            parts.append(rows_with_text(table, *columns, beside=_labels(table, label_column, target)))
        kind = tables[0].kinds.get(label_column)
        declared = getattr(getattr(kind, "feature", kind), "names", declared)
    parts = divide(parts, one_in=5)
    texts = [[row[0] if len(row) == 2 else row[:2] for row in part] for part in parts]
    labels = [[row[-1] for row in part] for part in parts]
    is_number, classes = target in NUMBERS, {*flatten([label for part in labels for label in part])}
    if not all(texts) or (not is_number and len(classes) < (2 if target == "class" else 1)):
        what = f"{len(texts[0])} training and {len(texts[1])} evaluation texts of {len(classes)} classes"
        raise UsageError(f"--data {data} has {what}: expected both, and two or more classes")
    if is_number:
        for part, task in zip(labels, ("training", "evaluation")):  # such as a test split with hidden numbers
            check_differ(data, part, f"numbers for {task}")
        return Labelled(texts[0], labels[0], ["LABEL_0"]), Labelled(texts[1], labels[1], ["LABEL_0"])
    both = with_same_classes(data, [Labelled.of_names(*each, declared) for each in zip(texts, labels)], "text")
    say_classes(data, both, "text", after=" (several of a text)" * (target == "classes"))
    return both[0], both[1]


def _standard_library() -> list[tuple[str, ...]]:
    """Consecutive lines of code, and the package that they are from."""
    rows = list[tuple[str, ...]]()
    for package in PACKAGES:
        for path in sorted((STDLIB / package).glob("*.py")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            starts = range(0, len(lines) - LINES_PER_TEXT + 1, LINES_PER_TEXT)
            rows += [("\n".join(lines[start : start + LINES_PER_TEXT]), package) for start in starts]
    return rows


def _labels(table: Table, column: str, target: str) -> list[Any]:
    """The class, classes or number of each row. Raises UsageError."""
    if target in NUMBERS:
        numbers = [*table.numbers(column)]
        if target == "probability" and (wrong := [one for one in numbers if not 0 <= one <= 1]):
            raise UsageError(f"--target probability: {wrong[0]:g} in column {column} is not one: use --target number")
        return numbers
    if target == "classes":
        return [tuple(filter(None, map(str.strip, cell))) for cell in table.lists(column, ",")]
    if any(isinstance(cell, list) for cell in table.values(column)):
        raise UsageError(f"--data {table.name}: column {column} has lists of classes: use --target classes{table.form}")
    labels = [*table.texts(column)]
    if empty := [row for row, name in enumerate(labels, start=1) if not (name and name.strip())]:
        raise UsageError(f"--data {table.name}: row {empty[0]} has no class in column {column}: fill or remove it")
    return labels
