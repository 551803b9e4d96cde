"""How two finished runs differ: losses, gradient norms, weights, evaluations and learning rates."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate_recipes.common.check.sketch import Sketch
from accelerate_recipes.common.check.tolerances import BF16, FLOAT32, RECORD, TOLERANCE, TRAJECTORY_TIMES_FLOOR
from accelerate_recipes.common.norms import relative_distance
from accelerate_recipes.common.records.run_card import read_card
from accelerate_recipes.common.weights.on_disk import WeightFiles

Point = tuple[int | None, str]  # (step, name of a value), or (None, name of a tensor after the last step)
# {key: how far rounding errors move it}, or {name of a value, or "weights": the same for all steps or tensors}
Floor = Mapping[Any, float]
# A record keeps 16 sums of each weight, so that the file stays small. Sums with different signs get a different name.
SKETCH, SUMS = "count sketch, 16 sums", 16


@dataclass(frozen=True)
class Trace:
    """A finished run."""

    # {(step, name): value} of training loss, norm of the gradient, learning rate and evaluation metrics; of a script on
    # plain Accelerate also "samples", the ids of a step, and in step 0 "gathered", the rows of all evaluations
    values: Mapping[tuple[int, str], Any]
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # after the last step; of a record, sums of a `Sketch`
    facts: Mapping[str, Any] = field(default_factory=dict)  # other facts, such as the run card

    @classmethod
    def of_run(cls, folder: Path) -> "Trace":
        """Reads metrics.jsonl, run.json and model/ of an output folder."""
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        weights = WeightFiles(sorted((folder / "model").glob("*.safetensors")))
        return cls(_values(map(json.loads, lines)), weights, read_card(folder))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Trace":
        """Reads the result of `to_record`, without weights that were summed by a different sketch."""
        sums = record.get("weights", {}) if record.get("sketch") == SKETCH else {}
        weights = {name: torch.tensor(each, dtype=torch.float64) for name, each in sums.items()}
        return cls(_values(record["records"]), weights, record)

    def to_record(self, with_weights: bool = False) -> dict[str, Any]:
        """The part of the run that a record keeps, for JSON, without sample ids and gathered rows."""
        records: dict[int, dict[str, Any]] = {}
        for (step, name), value in self.values.items():
            if _is_kept(name):
                records.setdefault(step, {"step": step})[name] = value
        kept = {name: self.facts.get(name) for name in ("hardware", "model_digest")} | {"records": [*records.values()]}
        if not with_weights:
            return kept
        sums = {name: Sketch.of(tensor, SUMS).sums for name, tensor in self.weights.items()}
        real = {name: torch.view_as_real(each) if each.is_complex() else each for name, each in sums.items()}
        return kept | {"sketch": SKETCH, "weights": {name: each.tolist() for name, each in real.items()}}


def _values(records: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], Any]:
    return {(record["step"], name): value for record in records for name, value in record.items() if _is_kept(name)}


def _is_kept(name: str) -> bool:
    return name in ("train/loss", "grad_norm", "learning_rate") or name.startswith("eval/")


@dataclass(frozen=True)
class Compared:
    """A value or a tensor of a run, next to that of its reference."""

    step: int | None  # as in `Point`
    name: str
    value: Any  # None for a tensor, or if a run has no value
    expected: Any
    size: float  # the relative difference; infinite where one of the two has no value
    tolerance: float  # up to which the two count as the same
    limit: float  # the tolerance, or what rounding explains

    @property
    def is_same(self) -> bool:
        return self.size <= self.limit


@dataclass(frozen=True)
class Difference:
    """How far a run is from its reference. None: the runs do not record this."""

    loss: float  # the largest relative difference over all training records
    gradient: float | None  # the same for the norm of the gradient
    weights: float  # the largest ‖w − w₀‖ / ‖w₀‖ of all exported tensors
    evaluation: float | None  # the same for the evaluation metrics
    learning_rate: float  # as `loss`; 0 if all are equal
    first_step: int | None  # the first step with a different loss, learning rate or evaluation; None if there is none
    tensor: str | None  # the name of the first exported tensor that is not the same; None if all are the same
    is_same: bool  # whether the run counts as the same
    is_noise: bool = False  # whether it is the same only because one process differs as much from itself

    @classmethod
    def of(cls, found: list[Compared]) -> "Difference":
        """Sums up the comparisons of a run."""
        evaluated = {one.name for one in found if one.name.startswith("eval/")} or {"gathered"}
        wrong = [one for one in found if not one.is_same]
        # The verdict names a difference in only these in its own words.
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
    """The values of two runs next to each other, step by step, and then the weights. `floor`: how far rounding errors
    move the reference; it counts if the run starts like the reference: random numbers, statistics over a batch and
    wrong sums show in the first step. `tolerances`: as in `common/check/tolerances.py`; None: for the run's precision.
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
    """How far each value (the largest up to its step) and each tensor is from the reference, in a run that differs by
    rounding errors. Empty if the first step differs: then more than rounding is different."""
    sizes, largest = _sizes(moved, reference), dict[str, float]()
    if not _starts_alike(sizes):
        return {}
    floor: dict[Point, float] = {}
    for (step, name), size in sizes.items():
        if size < math.inf:
            floor[step, name] = largest[name] = max(size, largest.get(name, 0.0))
    return floor


def of_all_steps(*floors: Mapping[Point, float]) -> dict[str, float]:
    """{value or "weights": the largest of all steps or tensors}: in a third run, rounding may move another one most."""
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
    """The relative difference of two values; infinite if one of the two is missing or not a number, and for unequal
    lists. The records contain None for a metric that is not finite; None equals None."""
    if value == expected:
        return 0.0
    if value is None or expected is None or isinstance(expected, list):
        return math.inf
    size = abs(value - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(size) else size


def distances(weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """{name: ‖w − w₀‖ / ‖w₀‖}, 0 only for equal tensors; infinite if one side lacks it or differs in shape or type."""
    found = dict.fromkeys([*reference, *weights], math.inf)
    for name in weights.keys() & reference.keys():
        weight, expected = weights[name], reference[name]
        if weight.shape == expected.shape and weight.dtype == expected.dtype:
            size = 0.0 if torch.equal(weight, expected) else relative_distance(weight, expected) or sys.float_info.min
            found[name] = math.inf if math.isnan(size) else size
    return found
