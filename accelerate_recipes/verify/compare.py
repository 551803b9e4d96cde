"""Compares two runs: losses, gradient norms, weights, evaluations and learning rates."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerate_recipes.common.check.tolerances import BF16, FLOAT32, RECORD, TOLERANCE, TRAJECTORY_TIMES_FLOOR
from accelerate_recipes.common.norms import relative_distance
from accelerate_recipes.verify.trace import Trace

Point = tuple[int | None, str]  # (step, name of a value), or (None, name of a tensor after the last step)
# {key: how far rounding errors move it}, or {name of a value, or "weights": the same for all steps or tensors}
Floor = Mapping[Any, float]


@dataclass(frozen=True)
class Compared:
    """A value of a run beside that of its reference, or a tensor."""

    step: int | None  # as in `Point`
    name: str
    value: Any  # None where a run has none, and of a tensor
    expected: Any
    size: float  # the relative difference; infinite where one of the two has no value
    tolerance: float  # up to which it is the same
    limit: float  # the tolerance, or what rounding explains

    @property
    def is_same(self) -> bool:
        """Whether the two count as the same."""
        return self.size <= self.limit


@dataclass(frozen=True)
class Difference:
    """How far a run is from its reference. None: the runs do not record this."""

    loss: float  # the largest relative difference over all training records
    gradient: float | None  # the same of its norm
    weights: float  # the largest ‖w − w₀‖ / ‖w₀‖ of all exported tensors
    evaluation: float | None  # as `loss`, of the evaluation metrics
    learning_rate: float  # as `loss`; 0 if all are equal
    first_step: int | None  # the first step whose loss, learning rate or evaluation is not the same; None if all are
    tensor: str | None  # the name of the first exported tensor that is not the same; None if all are
    is_same: bool  # whether the run counts as the same
    is_noise: bool = False  # whether it is the same only because one process is as far from itself

    @classmethod
    def of(cls, found: list[Compared]) -> "Difference":
        """Sums up what is compared of a run."""
        evaluated = {one.name for one in found if one.name.startswith("eval/")} or {"gathered"}
        wrong = [one for one in found if not one.is_same]
        # A difference in only these has its own words.
        steps = [one.step for one in wrong if one.step is not None and one.name not in ("grad_norm", "gathered")]

        def largest(*names: str) -> float | None:
            return max((one.size for one in found if one.step is not None and one.name in names), default=None)

        return cls(
            loss=largest("train/loss") or 0.0,
            gradient=largest("grad_norm"),
            weights=max((one.size for one in found if one.step is None), default=0.0),
            evaluation=largest(*evaluated),
            learning_rate=largest("learning_rate") or 0.0,
            first_step=min(steps, default=None),
            tensor=next((one.name for one in wrong if one.step is None), None),
            is_same=not wrong,
            is_noise=not wrong and any(one.size > one.tolerance for one in found),
        )

    @property
    def is_exact(self) -> bool:
        """Whether all values are equal bit for bit."""
        values = (self.loss, self.gradient, self.weights, self.evaluation, self.learning_rate)
        return not any(value for value in values if value is not None)


def compare(
    trace: Trace, reference: Trace, floor: Floor | None = None, tolerances: Mapping[str, float] | None = None
) -> Difference:
    """Compares a run with its reference: the sum of what `compared` returns."""
    return Difference.of(compared(trace, reference, floor, tolerances))


def compared(
    trace: Trace, reference: Trace, floor: Floor | None = None, tolerances: Mapping[str, float] | None = None
) -> list[Compared]:
    """What two runs have beside each other, step by step, and then the weights.

    Args:
        trace: a run.
        reference: what it should be.
        floor: how far rounding errors move the reference. It counts if the run starts like the reference: random
            numbers, statistics over a batch and wrong sums show in the first step.
        tolerances: as in `common/check/tolerances.py`; None: those of the run's precision.
    """
    if tolerances is None:
        tolerances = BF16 if trace.facts.get("precision") == "bf16" else FLOAT32
    sizes = _sizes(trace, reference)
    if floor is None or (tolerances is not RECORD and not _starts_alike(sizes)):
        floor = {}
    found = []
    for (step, name), size in sizes.items():
        if tolerances is BF16 and name.startswith("eval/") and not name.endswith("loss"):
            continue
        kind = "weights" if step is None else name
        tolerance = tolerances[kind if kind in tolerances else ""]
        noise = floor.get((step, name), 0.0) or floor.get(kind, 0.0)
        value, expected = (None if step is None else each.values.get((step, name)) for each in (trace, reference))
        limit = max(tolerance, TRAJECTORY_TIMES_FLOOR * noise)
        found.append(Compared(step, name, value, expected, size, tolerance, limit))
    return found


def noise_floor(moved: Trace, reference: Trace) -> dict[Point, float]:
    """How far each value is up to its step, and each tensor, from the reference in a run that differs by rounding
    errors. Empty if the run starts otherwise: then more than rounding is different."""
    sizes, largest = _sizes(moved, reference), dict[str, float]()
    if not _starts_alike(sizes):
        return {}
    floor: dict[Point, float] = {}
    for (step, name), size in sizes.items():
        if size < math.inf:
            floor[step, name] = largest[name] = max(size, largest.get(name, 0.0))
    return floor


def of_all_steps(*floors: Mapping[Point, float]) -> dict[str, float]:
    """{name of a value, or "weights": the largest of all steps, or tensors}. For two runs are few: in a third one
    another step or tensor may be the one that rounding moves most."""
    found: dict[str, float] = {}
    for (step, name), size in (each for floor in floors for each in floor.items()):
        kind = "weights" if step is None else name
        found[kind] = max(size, found.get(kind, 0.0))
    return found


def _sizes(trace: Trace, reference: Trace) -> dict[Point, float]:
    """{key: relative difference} of all values in the order of their steps, and then of all tensors."""
    keys = sorted({**reference.values, **trace.values}, key=lambda key: key[0])
    found: dict[Point, float] = {key: relative(trace.values.get(key), reference.values.get(key)) for key in keys}
    return found | {(None, name): size for name, size in distances(trace.weights, reference.weights).items()}


def _starts_alike(sizes: Mapping[Point, float]) -> bool:
    """Whether the first step has the same loss, gradient and learning rate."""
    first = min((step for step, name in sizes if step is not None and name == "train/loss"), default=None)
    limits = {"train/loss": TOLERANCE, "grad_norm": FLOAT32["grad_norm"], "learning_rate": 0.0}
    return first is not None and all(sizes.get((first, name), 0.0) <= limits[name] for name in limits)


def relative(value: Any, expected: Any) -> float:
    """The relative difference of two values; infinite if one of the two is missing or not a number, and of unequal
    lists. A metric that is not finite is None in the records: two of these are equal."""
    if value == expected:
        return 0.0
    if value is None or expected is None or isinstance(expected, list):
        return math.inf
    size = abs(value - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(size) else size


def distances(weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """{name: ‖w − w₀‖ / ‖w₀‖}, 0 only for equal tensors; infinite where one of the two lacks the tensor or has another
    shape or type."""
    return {
        name: _distance(weights[name], reference[name]) if name in weights and name in reference else math.inf
        for name in dict.fromkeys([*reference, *weights])
    }


def _distance(weight: Tensor, expected: Tensor) -> float:
    if weight.shape != expected.shape or weight.dtype != expected.dtype:
        return math.inf
    if torch.equal(weight, expected):
        return 0.0
    size = relative_distance(weight, expected)
    return math.inf if math.isnan(size) else max(size, sys.float_info.min)
