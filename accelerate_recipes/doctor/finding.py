"""What a rule reports, and how rules run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import yaml

from accelerate_recipes.common.errors import Edit, join_advice

Rule = Callable[..., Iterator["Finding"]]


class Finding:
    """Something that makes a run fail, or makes it a different run from the one that was asked for."""

    def __init__(self, what: str, why: str, *cure: Edit | str):
        self.what, self.why = what, why  # what is wrong, with the given value; what happens because of it
        # `doctor --fix` makes them. They resolve the finding. If the file works, they keep what it runs, or do what a
        # key evidently asks for.
        self.edits = [part for part in cure if isinstance(part, Edit)]
        self.by_hand = "; ".join(part for part in cure if isinstance(part, str))  # what else to type, or instead

    @property
    def type(self) -> str:
        """What to type instead: a command, or lines of the config file."""
        return join_advice("; ".join(words(self.edits)), self.by_hand)


def words(edits: Sequence[Edit]) -> Iterator[str]:
    """Edits as lines of the file, and what to remove from it."""
    for section, group in groupby(edits, lambda edit: edit.section):
        inside, place = [*group], f" below {section}" if section else ""
        lines = [as_yaml({edit.key: edit.value})[1:-1] for edit in inside if edit.value is not None]
        removed = [edit.key for edit in inside if edit.value is None]
        yield from (f"{line}{place}" for line in [*lines, *[f"remove {', '.join(removed)}"] * bool(removed)])


def as_yaml(value: Any) -> str:
    """A value as a file has it, in one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


def findings(rules: Iterable[Rule], *facts: Any) -> list[Finding]:
    """All findings of the rules, in the order of the rules."""
    return [finding for rule in rules for finding in rule(*facts)]
