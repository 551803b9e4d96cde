"""Compares two runs: losses, gradient norms, weights, evaluations and learning rates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate_recipes.verify.runs import Finished

TOLERANCE = 1e-5  # float32; relative
# So far may a run be from its reference, in units of how far one process is from itself. Two runs measure that: in a
# third one another weight jumped, 6 times as far (a bias before GroupNorm, under Adam).
TIMES_FLOOR = 10
BF16_TOLERANCE = 1e-2  # bf16 keeps 8 bits, and configs round at different places: up to 0.7 % for our recipes


@dataclass(frozen=True)
class Difference:
    """How far a run is from its reference. None: the runs do not record this.

    Attributes:
        loss, gradient, evaluation: the largest relative difference over all records of the training loss, of the norm
            of the gradient, and of the evaluation metrics.
        weights: the largest ‖w − w₀‖ / ‖w₀‖ of all exported tensors.
        learning_rate: the largest relative difference; 0 if all are equal.
        first_step: the first step whose loss, learning rate or evaluation is not the same; None if all are.
        tensor: the name of the first exported tensor that is not the same; None if all are.
        is_same: whether the run counts as the same.
        is_noise: whether it is the same only because one process is as far from itself.
    """

    loss: float
    gradient: float | None
    weights: float
    evaluation: float | None
    learning_rate: float
    first_step: int | None
    tensor: str | None
    is_same: bool
    is_noise: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether all values are equal bit for bit."""
        values = (self.loss, self.gradient, self.weights, self.evaluation, self.learning_rate)
        return not any(value for value in values if value is not None)


def compare(run: Finished, reference: Finished, floors: Sequence[Finished] = ()) -> Difference:
    """Compares a finished run with its reference, in the precision of the run.

    Args:
        run: finished.
        reference: finished.
        floors: the reference with other micro-batches, if it `starts_alike`: what differs there is noise.
    """
    strict = _compare(run, reference, ())
    if strict.is_same or not floors or not starts_alike(run, reference):
        return strict
    return replace(_compare(run, reference, floors), is_noise=True)


def starts_alike(run: Finished, reference: Finished) -> bool:
    """Whether the first step has the same loss, gradient and learning rate: what differs later is rounding, which
    training amplifies. Random numbers, statistics over a batch and wrong sums show in the first step."""
    limits = {"train/loss": TOLERANCE, "grad_norm": 10 * TOLERANCE, "learning_rate": 0.0}
    found = {name: _differences(run, reference, name) for name in limits}
    return all(values and values[min(values)] <= limits[name] for name, values in found.items())


def _compare(run: Finished, reference: Finished, floors: Sequence[Finished]) -> Difference:
    in_bf16 = run.card.get("precision") == "bf16"
    tolerance = BF16_TOLERANCE if in_bf16 else TOLERANCE
    names = sorted({name for record in reference.records for name in record if name.startswith("eval/")})
    if in_bf16:  # a rounding error may flip a class, or move an R² near 0 by more than a loss
        names = [name for name in names if name.endswith("loss")]

    def noise(name: str) -> float:
        return TIMES_FLOOR * max((_largest(_differences(floor, reference, name)) for floor in floors), default=0.0)

    moved = [_largest(weight_distances(floor.folder / "model", reference.folder / "model")) for floor in floors]
    loss, gradient = (_differences(run, reference, name) for name in ("train/loss", "grad_norm"))
    rates = _differences(run, reference, "learning_rate")
    evaluations = {name: _differences(run, reference, name) for name in names}
    distances = weight_distances(run.folder / "model", reference.folder / "model")
    limits = {name: max(tolerance, noise(name)) for name in ("train/loss", *names)}
    compared = {"train/loss": loss} | evaluations
    wrong = {step for name, values in compared.items() for step, value in values.items() if not value <= limits[name]}
    wrong |= {step for step, value in rates.items() if value > 0}
    allowed = max([tolerance, *(TIMES_FLOOR * distance for distance in moved)])
    tensor = next((name for name, value in distances.items() if not value <= allowed), None)
    largest_gradient = _largest(gradient)
    # In bf16 the README promises losses, not weights.
    is_close = tensor is None and largest_gradient <= max(10 * tolerance, noise("grad_norm"))
    is_same = not wrong and (in_bf16 or is_close)
    return Difference(
        loss=_largest(loss),
        gradient=largest_gradient,
        weights=_largest(distances),
        evaluation=max(map(_largest, evaluations.values()), default=0.0),
        learning_rate=_largest(rates),
        first_step=min(wrong, default=None),
        tensor=tensor,
        is_same=is_same,
    )


def _differences(run: Finished, reference: Finished, name: str) -> dict[int, float]:
    """{step: relative difference}; infinite where one of the two has no value."""
    values, expected = run.column(name), reference.column(name)
    steps = sorted(values.keys() | expected.keys())
    return {step: relative(values.get(step), expected.get(step)) for step in steps}


def relative(value: float | None, expected: float | None) -> float:
    """The relative difference; infinite if one of the two is None."""
    if value is None or expected is None:
        return float("inf")
    return 0.0 if value == expected else abs(value - expected) / max(abs(expected), 1e-12)


def weight_distances(folder: Path, reference: Path) -> dict[str, float]:
    """{name: ‖w − w₀‖ / ‖w₀‖}; infinite where one of the two lacks the tensor or has another shape."""
    weights, expected = load(folder), load(reference)
    distances = {}
    for name in expected | weights:
        one, other = weights.get(name), expected.get(name)
        if one is None or other is None or one.shape != other.shape:
            distances[name] = float("inf")
            continue
        one, other = one.double(), other.double()
        distances[name] = float((one - other).norm() / other.norm().clamp(min=1e-12))
    return distances


def load(folder: Path) -> dict[str, Any]:
    """{name: tensor} of a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _largest(values: dict[Any, float]) -> float:
    return max(values.values(), default=0.0)
