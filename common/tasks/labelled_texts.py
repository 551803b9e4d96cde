"""Texts with a class each: embedded, in a file, or on the Hub."""

import sysconfig
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..data.facts import count_by_class, say
from ..errors import UsageError
from .labelled import Labelled, with_same_classes
from .rows import Table, rows_with_text
from .sources import hold_out, load_tables
from .tokenization import encode_texts

# Packages that every Python has, without parts that a distribution may leave out.
PACKAGES = ("asyncio", "email", "logging", "multiprocessing", "unittest")
LINES_PER_TEXT = 4
HELD_OUT = 5  # one text in so many is for evaluation, if the source has no evaluation part
ADVICE = "use --data stdlib for the embedded texts, or the path of a .csv, .jsonl or .parquet file"


class EncodedTexts(Dataset):
    """Samples {"input_ids": int64 of shape (length,), "label": int, "class_weight": float}.

    Args:
        source: the texts.
        tokenizer: a tokenizer of transformers.
        max_length: tokens beyond this number are left out.
        class_weights: how much a text of each class counts in the loss.
    """

    def __init__(self, source: Labelled, tokenizer: Any, max_length: int, class_weights: list[float]):
        kept, (self.tokens,) = encode_texts([source.samples], tokenizer, max_length)
        self.labels, self.class_weights = [source.labels[row] for row in kept], class_weights

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = self.labels[index]
        return {"input_ids": self.tokens[index], "label": label, "class_weight": self.class_weights[label]}


def load_labelled_texts(data: str, text_column: str = "text", label_column: str = "label") -> tuple[Labelled, Labelled]:
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
        tables = load_tables(data, ADVICE, is_labelled=lambda table: table.has_classes(label_column))
        parts = [_rows(table, text_column, label_column) for table in tables]
        declared = getattr(tables[0].kinds.get(label_column), "names", declared)
    if len(parts) == 1:
        parts = [[parts[0][number] for number in ids.sort().values] for ids in hold_out(len(parts[0]), HELD_OUT)]
    texts, names = ([[row[at] for row in part] for part in parts] for at in (0, 1))
    if len(classes := {name for part in names for name in part}) < 2 or not all(texts):
        raise UsageError(
            f"--data {data} has {len(texts[0])} training and {len(texts[1])} evaluation texts of {len(classes)} "
            "classes: expected both, and two or more classes"
        )
    both = [Labelled.of_names(*each, declared) for each in zip(texts, names)]
    train, evaluation = with_same_classes(data, both, "text")
    say(f"--data {data}: {count_by_class(train.classes, train.labels + evaluation.labels)}")
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
