"""The differences between the steps of all processes and the same steps of one process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..step.engine import Engine
from ..weights.shards import local, range_of
from .sketch import Sketch
from .trace import Step

# ("value", its name), ("eval", its name), ("norm", ""), ("weight", its name), ("replica", name of a weight)
Key = tuple[str, str]


@dataclass(frozen=True)
class Gap:
    """A relative difference, and the text that reports it; for a weight, also its sketch."""

    size: float
    text: str = ""
    weight: Sketch | None = None


def step_gaps(step: Step, expected: Step, rank: int = 0) -> dict[Key, Gap]:
    """The differences of the values of `forward_step` and of the norm of the gradient."""
    text = f"the norm of the gradient is {step.grad_norm:.7g}, {expected.grad_norm:.7g} on one process"
    size = abs(step.grad_norm - expected.grad_norm) / max(abs(expected.grad_norm), 1e-30)
    gaps = {("norm", ""): Gap(size, text)}
    return _value_gaps(step, expected, rank, "value") | _value_gaps(step, expected, rank, "eval") | gaps


def _value_gaps(step: Step, one: Step, rank: int, kind: str) -> dict[Key, Gap]:
    """The largest difference of each value of `forward_step`, relative to the value or to a larger mean."""
    steps, reference = (each.values if kind == "value" else each.evaluated for each in (step, one))
    gaps, when = dict[Key, Gap](), " in evaluation" * (kind == "eval")
    for row, values in steps.items():
        if values.keys() != (expected := reference[row]).keys():
            text = f"forward_step returns {', '.join(values)} in process {rank}, {', '.join(expected)} on one process"
            return {(kind, next(iter(values.keys() ^ expected.keys()))): Gap(math.inf, text)}
        for name, value in values.items():
            other = expected[name]
            if kind == "eval" and value.ndim > 1 and value.shape != other.shape:
                continue  # generated answers: a rounding error may change their length
            value, other = (each.reshape(len(each), -1) for each in (value, other))
            is_equal = (value == other) | (value.isnan() & other.isnan())  # also infinities
            distances, norms = (value - other).masked_fill(is_equal, 0.0), other.nan_to_num(0.0, 0.0, 0.0).norm(dim=1)
            sizes = distances.norm(dim=1) / norms.clamp(min=max(float(norms.mean()), 1e-30))
            at = int(sizes.nan_to_num(math.inf).argmax())
            if (size := float(sizes.nan_to_num(math.inf)[at])) > gaps.get((kind, name), Gap(-1.0)).size:
                element = int(distances[at].abs().nan_to_num(math.inf).argmax())
                both = f"{float(value[at, element]):.7g} in process {rank}, {float(other[at, element]):.7g}"
                gaps[kind, name] = Gap(size, f'"{name}" of sample {step.ids[row][at]}{when} is {both} on one process')
    return gaps


def weight_gap(name: str, weight: Sketch, expected: Sketch, initial: Sketch) -> Gap:
    """The difference of a weight relative to its update since the first step, beyond what its type can hold."""
    slack = (weight.rounding + expected.rounding) * expected.norm
    # Infinities, as in a mask, have no distance.
    distance = (weight - expected).norm if math.isfinite(expected.norm) else 0.0
    size = _share(distance, slack, (expected - initial).norm)
    return Gap(size, f"the update of {name} differs by {size:.2g} of its size from that on one process", weight)


def _share(distance: float, slack: float, update: float) -> float:
    """The distance beyond the slack, relative to the update; infinite if it is NaN."""
    if distance <= slack:
        return 0.0
    share = (distance - slack) / max(update, slack, 1e-30)
    return math.inf if math.isnan(share) else share


def fingerprints(engine: Engine) -> dict[Any, tuple[float, float]]:
    """{(name of a weight, range): (a sum, norm) of this process's part}, to compare with processes that hold the same
    part. Buffers are the same in processes that see the same samples."""
    sums: dict[Any, tuple[float, float]] = {}
    layout = engine.plan.layout
    for name, tensor in engine.saved_tensors().items():
        is_weight = isinstance(tensor, nn.Parameter)
        if tensor.is_floating_point() and (is_weight or layout.tp > 1):
            sketch = Sketch.of(local(tensor))
            samples = None if is_weight else layout.data_parallel_rank
            sums[name, range_of(tensor), samples] = (float(sketch.sums.sum()), sketch.norm)
    return sums


def replica_gaps(steps: Sequence[Step], updates: Mapping[str, float]) -> dict[Key, Gap]:
    """The differences between replicas of a shard. `steps`: of each process; `updates`: {weight: its norm}."""
    gaps, first = dict[Key, Gap](), dict[Any, tuple[float, float]]()
    for rank, step in enumerate(steps):
        for key, (total, norm) in step.parts.items():
            expected = first.setdefault(key, (total, norm))[0]
            distance = abs(total - expected) if math.isfinite(expected) else 0.0
            size = _share(distance, torch.finfo(torch.float32).eps * norm, updates.get(key[0], 0.0))
            if size > gaps.get(("replica", key[0]), Gap(-1.0)).size:
                gaps["replica", key[0]] = Gap(size, f"process {rank}'s {key[0]} differs from the processes before it")
    return gaps
