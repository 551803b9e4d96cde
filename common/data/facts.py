"""What a run says of its data at its start. The run card keeps these lines."""

from collections.abc import Mapping, Sized

from ..environment import print_once

_said: list[str] = []


def say(line: str) -> None:
    """Prints a line about the data in the first of the processes, and keeps it."""
    print_once(line)
    _said.append(line)


def data_lines() -> list[str]:
    """The lines so far."""
    return [*_said]


def say_sizes(num_training: int, eval_sets: Mapping[str, Sized]) -> None:
    """Says how many samples the sets have."""
    parts = [f"{len(part):,} for evaluation{f' ({name})' if name else ''}" for name, part in eval_sets.items()]
    say(f"{num_training:,} training samples, {', '.join(parts)}")
