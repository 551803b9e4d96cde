"""The facts about the data that a run prints at its start and keeps in the run card."""

from collections import Counter
from collections.abc import Sequence

from ..environment import print_once

_said: list[str] = []

NUM_NAMED = 6  # of a long list


def say(line: str) -> None:
    """Prints a line about the data in the first process, and keeps it."""
    print_once(line)
    _said.append(line)


def data_lines() -> list[str]:
    """The lines so far."""
    return [*_said]


def count_by_class(classes: Sequence[str], labels: Sequence[int]) -> str:
    """How many samples each class has, for a line: "3 classes: bus 20, car 20, rail 20"; the first few of many."""
    counts = Counter(labels)
    return f"{len(classes):,} classes: {shorten([f'{name} {counts[number]:,}' for number, name in enumerate(classes)])}"


def shorten(names: Sequence[str], most: int = NUM_NAMED) -> str:
    """A list of names for a line, the first few of many."""
    return printable(", ".join(names[:most])) + f", ... ({len(names):,} in all)" * (len(names) > most)


def printable(name: str) -> str:
    """A name for a line, with a question mark for each character that no terminal shows, such as a line break."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
