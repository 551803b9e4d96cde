"""A finding, which a rule reports, and a function that runs rules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import yaml

from accelerate_recipes.common.errors import Edit, join_advice

Rule = Callable[..., Iterator["Finding"]]


class Finding:
    """A mistake that makes a run fail, or run differently than you asked."""

    def __init__(self, what: str, why: str, *cure: Edit | str):
        self.what, self.why = what, why  # what is wrong, with the given value; what happens because of it
        # `doctor --fix` makes these edits to resolve the finding. If the file works, they do not change the run that it
        # describes, or they do what a key clearly asks for.
        self.edits = [part for part in cure if isinstance(part, Edit)]
        self.by_hand = "; ".join(part for part in cure if isinstance(part, str))  # what to type as well, or instead

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
    """A value in YAML, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


def findings(rules: Iterable[Rule], *facts: Any) -> list[Finding]:
    return [finding for rule in rules for finding in rule(*facts)]
