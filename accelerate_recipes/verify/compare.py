"""Compares two runs: losses, gradient norms, weights, evaluations and learning rates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_recipes.verify.runs import Finished

TOLERANCE = 1e-5  # float32; relative
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
    """

    loss: float
    gradient: float | None
    weights: float
    evaluation: float | None
    learning_rate: float
    first_step: int | None
    tensor: str | None
    is_same: bool

    @property
    def is_exact(self) -> bool:
        """Whether all values are equal bit for bit."""
        values = (self.loss, self.gradient, self.weights, self.evaluation, self.learning_rate)
        return not any(value for value in values if value is not None)


def compare(run: Finished, reference: Finished) -> Difference:
    """Compares a finished run with its reference, in the precision of the run."""
    in_bf16 = run.card.get("precision") == "bf16"
    tolerance = BF16_TOLERANCE if in_bf16 else TOLERANCE
    names = sorted({name for record in reference.records for name in record if name.startswith("eval/")})
    if in_bf16:  # a rounding error may flip a class, or move an R² near 0 by more than a loss
        names = [name for name in names if name.endswith("loss")]
    loss, gradient = (_differences(run, reference, name) for name in ("train/loss", "grad_norm"))
    rates = _differences(run, reference, "learning_rate")
    evaluations = [_differences(run, reference, name) for name in names]
    distances = _distances(run.folder / "model", reference.folder / "model")
    wrong = {step for values in (loss, *evaluations) for step, value in values.items() if not value <= tolerance}
    wrong |= {step for step, value in rates.items() if value > 0}
    tensor = next((name for name, value in distances.items() if not value <= tolerance), None)
    largest_gradient = _largest(gradient)
    # In bf16 the README promises losses, not weights.
    is_same = not wrong and (in_bf16 or (tensor is None and largest_gradient <= 10 * tolerance))
    return Difference(
        loss=_largest(loss),
        gradient=largest_gradient,
        weights=_largest(distances),
        evaluation=max(map(_largest, evaluations), default=0.0),
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


def largest_distance(folder: Path, reference: Path) -> tuple[float, str | None]:
    """(the largest ‖w − w₀‖ / ‖w₀‖ of the tensors in two folders, the name of the first one beyond TOLERANCE)"""
    distances = _distances(folder, reference)
    return _largest(distances), next((name for name, value in distances.items() if not value <= TOLERANCE), None)


def _distances(folder: Path, reference: Path) -> dict[str, float]:
    """{name: ‖w − w₀‖ / ‖w₀‖}; infinite where one of the two lacks the tensor or has another shape."""
    weights, expected = _load(folder), _load(reference)
    distances = {}
    for name in expected | weights:
        one, other = weights.get(name), expected.get(name)
        if one is None or other is None or one.shape != other.shape:
            distances[name] = float("inf")
            continue
        one, other = one.double(), other.double()
        distances[name] = float((one - other).norm() / other.norm().clamp(min=1e-12))
    return distances


def _load(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _largest(values: dict[Any, float]) -> float:
    return max(values.values(), default=0.0)
