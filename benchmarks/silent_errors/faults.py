"""What a planted error is, and the table of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accelerate_recipes.common.data.sets import ForwardStep, MapDataset

TRAINCHECK, TTRACE, OURS = "TrainCheck", "TTrace", "ours"


@dataclass
class Parts:
    """What a recipe gives to `fit`, for a fault to change."""

    accelerator: Any
    config: Any
    model: nn.Module
    optimizer: Optimizer
    forward_step: ForwardStep
    train_set: MapDataset
    eval_set: MapDataset
    options: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """An error of the literature.

    Attributes:
        name: of the function that plants it.
        list: the paper whose list it is from.
        source: the report.
        what: goes wrong.
        config: under which it is planted.
        flags: of recipe.py.
        names: parts of the names of the modules or weights in which it is; none, if it is in no single one.
        cause: a part of a line that gives the true cause.
        why: it cannot occur; "" if it can.
        without: flags of recipe.py for one process that trains what this error would spoil.
        plant: changes the parts of the recipe, or patches the framework; None: the description alone.
    """

    name: str
    list: str
    source: str
    what: str
    config: str
    flags: str
    names: tuple[str, ...]
    cause: str
    why: str
    without: str
    plant: Callable[[Parts], None] | None


FAULTS: dict[str, Fault] = {}


def fault(
    list: str,
    source: str,
    config: str,
    flags: str = "",
    names: str = "",
    cause: str = "",
    why: str = "",
    without: str = "",
) -> Callable[[Callable[[Parts], None]], Callable[[Parts], None]]:
    """Adds the decorated function to FAULTS. `names` has one name a word."""

    def add(plant: Callable[[Parts], None]) -> Callable[[Parts], None]:
        what = " ".join((plant.__doc__ or "").split())
        given = (list, source, what, config, flags, tuple(names.split()), cause, why, without)
        FAULTS[plant.__name__] = Fault(plant.__name__, *given, plant)
        return plant

    return add


def described(name: str, list: str, source: str, what: str, why: str) -> None:
    """Adds an error that no training run can have."""
    FAULTS[name] = Fault(name, list, source, what, "", "", (), "", why, "", None)


def is_alone() -> bool:
    """Whether this is the run of one process, or the steps that the main process takes alone."""
    return "RANK" not in os.environ


def rank() -> int:
    """The number of this process; 0 if it is alone."""
    return int(os.environ.get("RANK", "0"))
