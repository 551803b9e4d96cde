"""What a rule reports, and how rules run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Rule = Callable[..., Iterator["Finding"]]


@dataclass(frozen=True)
class Finding:
    """Something that makes a run fail, or makes it another run than the one that was asked for.

    Attributes:
        what: what is wrong, with the given value.
        why: what happens because of it.
        type: what to type instead: a command, or a line of the config file.
    """

    what: str
    why: str
    type: str


def findings(rules: Iterable[Rule], *facts: Any) -> list[Finding]:
    """All findings of the rules, in the order of the rules."""
    return [finding for rule in rules for finding in rule(*facts)]
