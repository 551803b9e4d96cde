"""`--data` with several sources: `a.jsonl:3,b.jsonl:1`, or a YAML file with {source: weight}."""

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from ...config import RunConfig
from ...data.facts import say
from ...data.mixed import OF, Mixture
from ...errors import UsageError

Part = TypeVar("Part")
EXAMPLE = "use one source and its weight per line, such as chats.jsonl: 3"


def weights_of(data: str) -> dict[str, float] | None:
    """{source: its weight}; None if `--data` names one source. Raises UsageError for invalid weights."""
    if os.path.isdir(data) or (os.path.isfile(data) and Path(data).suffix not in (".yaml", ".yml")):  # noqa: PTH112, PTH113
        return None  # a file may be called a:1,b:2; os.path returns False for a name that is too long
    words = [word.strip() for word in data.split(",")]
    given = [re.fullmatch(r"[^,]+:([-+]?[\d.][\d.e+-]*|[-+]?(nan|inf)\w*)", word, re.I) is not None for word in words]
    if len(words) > 1 and any(given):
        if not all(given):
            raise UsageError(f"--data {data}: {words[given.index(False)]} has no weight: use a number after a colon")
        pairs = [word.rsplit(":", 1) for word in words]
        found: dict[Any, Any] = dict(pairs)
        if len(found) < len(pairs):
            raise UsageError(f"--data {data} lists a source twice: list each once, with its total weight")
    elif Path(data).suffix in (".yaml", ".yml"):
        try:
            found = yaml.safe_load(Path(data).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or "no YAML"
            raise UsageError(f"--data {data} cannot be read ({reason}): {EXAMPLE}") from None
        if not isinstance(found, dict) or len(found) < 2:
            raise UsageError(f"--data {data}: expected two sources or more: {EXAMPLE}")
    else:
        return None
    weights: dict[str, float] = {}
    for source, weight in found.items():
        with suppress(TypeError, ValueError):
            weights[str(source)] = float(weight)
        if not 0 < weights.get(str(source), 0) < math.inf:
            raise UsageError(f"--data {data}: {source} has the weight {weight}: expected a number above 0")
    return weights


class Sources(Generic[Part]):
    """The sources of `--data`. `train` and `evaluation` are the parts of the first one, or of the only one. Raises
    UsageError like `load`, and for wrong weights, or sources that do not fit.

    Args:
        config: `--data` and `--mixture_ends`.
        load: source -> (training part, evaluation part), which need not be datasets yet.
        same: names of attributes of the training parts that all sources must share.
    """

    def __init__(self, config: RunConfig, load: Callable[[str], tuple[Part, Part]], same: tuple[str, ...] = ()):
        self.repeats, self.weights = config.mixture_ends == "all", weights_of(config.data)
        parts = {source: load(source) for source in self.weights or [config.data]}
        names = {source: Path(source).stem.replace(OF, "_") for source in parts}
        if len({*names.values()}) < len(names):  # files of one name in several folders
            names = {source: source.replace(OF, "_").replace("/", "_") for source in parts}
        self.parts = {names[source]: both for source, both in parts.items()}
        self.shares = {names[source]: weight for source, weight in (self.weights or {}).items()}
        self.train, self.evaluation = next(iter(self.parts.values()))
        for name, (part, _) in self.parts.items():
            for attribute in same:
                first, other = getattr(self.train, attribute), getattr(part, attribute)
                if first != other:
                    what = f"{attribute} is {other} in {name} and {first} in the first source: they must be the same"
                    raise UsageError(f"--data {config.data}: {what}")

    def sets(
        self, train: Callable[[Part], Any] = lambda part: part, evaluation: Callable[[Part], Any] | None = None
    ) -> tuple[Any, Any]:
        """(training set, evaluation set) of all sources, by functions for their parts: one for both, or two."""
        evaluation = evaluation or train
        if self.weights is None:
            return train(self.train), evaluation(self.evaluation)
        mixture = Mixture({name: train(part) for name, (part, _) in self.parts.items()}, self.shares, self.repeats)
        each = zip(mixture.names, mixture.counts, mixture.sizes)
        facts = [f"{name} {count:,} of {size:,}" for name, count, size in each]
        say(f"mixture: an epoch has {sum(mixture.counts):,} samples: {', '.join(facts)}")
        return mixture, Mixture({name: evaluation(part) for name, (_, part) in self.parts.items()})
