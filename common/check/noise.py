"""The noise floor: how far rounding errors in the weights move one process."""

import math

import torch
from torch import Tensor

from .compare import Gap, Key, step_gaps, weight_gap
from .reference import Perturbed, Reference
from .sketch import WIDTH, Sketch
from .tolerances import BF16, METRIC_TIMES_FLOOR, STEP_TIMES_FLOOR, TOLERANCE
from .trace import Step

REPEATED, SMALL = 1e-4, 0.01  # how far a repeated gradient may differ, of its size or of this share of all gradients
# An optimizer that uses the sign of a gradient, such as Adam, moves an element by its own size if rounding changes the
# sign. The share of such elements is about the share of rounding in the gradient, and the distance its square root.
TIMES_ROOT = 10
IS_ROUNDING = 0.01  # share of a gradient that changes with rounding: above, it is zero in exact arithmetic
IS_SMALL = 3e-4  # the same for an element: above, its gradient may be as small as Adam's epsilon, so its update changes


def without_noise(gaps: dict[Key, Gap], reference: Reference, number: int) -> tuple[dict[Key, Gap], list[str]]:
    """(the differences in step `number` beyond rounding, lines about those that rounding explains only in part)"""
    if reference.is_low:  # a metric such as an accuracy jumps with the rounding
        gaps = {key: gap for key, gap in gaps.items() if key[0] not in ("value", "eval") or key[1] == "loss"}
    gaps, lines = {key: gap for key, gap in gaps.items() if not gap.size <= TOLERANCE}, list[str]()
    gaps = {key: _of_other_elements(gap, reference, number, key[1]) for key, gap in gaps.items()}
    gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TOLERANCE}
    for other in reference.perturbed if gaps else []:
        floors = _floors(reference, other, number)
        # Few elements of a large weight jump, by chance: with one measurement, what most of them do counts for each.
        large = {name for name, weight in reference.initial.items() if len(weight.sums) == WIDTH}
        sizes = [floors["weight", name].size for name in large & other.steps[number].weights.keys()]
        usual = float(torch.tensor(sizes).quantile(0.25)) if sizes and len(reference.perturbed) == 1 else 0.0
        for key, gap in list(gaps.items()):
            floor = max(floors[key].size, usual if key[0] in ("weight", "replica") and key[1] in large else 0.0)
            is_metric = key[0] in ("value", "eval") and key[1] != "loss"
            if not gap.size <= (METRIC_TIMES_FLOOR if is_metric else STEP_TIMES_FLOOR) * floor:
                continue
            of_both = _gradients(reference, other, number, key[1])
            if key[0] in ("weight", "replica") and not _is_explained(floor, *of_both):
                if floor >= 1:  # nothing but a gradient of zero lets a weight move by its own size
                    continue
                lines.append(
                    f"the update of {key[1]} differs by {gap.size:.1g} of its size, and by {floor:.1g} on one process "
                    "if its weights are perturbed by rounding errors; its gradient does not explain that: the "
                    "optimizer amplifies rounding"
                )
            del gaps[key]
    return gaps, list({line.split(" differs")[0]: line for line in lines}.values())


def what_does_not_repeat(again: Step, expected: Step, is_low: bool) -> str | None:
    """The difference when one process repeats the first step from the same state; None if there is none. On GPUs
    kernels may add in a different order: updates are compared where the gradients have the same bits."""
    if not math.isfinite(expected.grad_norm):
        return None
    limit = BF16[""] if is_low else REPEATED
    for (kind, name), gap in step_gaps(again, expected).items():
        is_compared = kind == "norm" or name == "loss" or not is_low
        if is_compared and not gap.size <= (TOLERANCE if kind != "norm" and not is_low else limit):
            return gap.text.replace(" in process 0", "").replace("on one process", "before")
    whole = math.hypot(*(gradient.norm for gradient in expected.gradients.values()))
    for name, gradient in expected.gradients.items():
        distance = (again.gradients[name] - gradient).norm if name in again.gradients else math.inf
        if not distance <= limit * max(gradient.norm, SMALL * whole):
            return f"the gradient of {name} differs by {distance / max(gradient.norm, 1e-30):.1g} of its size"
        if not distance and (change := (again.weights[name] - expected.weights[name]).norm):
            return f"the update of {name} differs by {change:.1g}"
    return None


def _of_other_elements(gap: Gap, reference: Reference, number: int, name: str) -> Gap:
    """The difference of a weight without the elements that rounding can move that far. By chance, a perturbed step may
    move a different element, or move an element less: here the average change of an element's gradient counts."""
    expected, initial = reference.steps[number].weights.get(name), reference.initial.get(name)
    if gap.weight is None or expected is None or initial is None or len(expected.sums) == WIDTH:
        return gap  # the sums of a large weight are not its elements
    moved = torch.zeros_like(expected.sums)
    for step in range(min(reference.steps), number + 1):
        update = (reference.steps[step].weights[name] - initial).sums.abs()
        for other in reference.perturbed:
            moved = moved.maximum(_moved(update, *_gradients(reference, other, step, name)))
    difference = (gap.weight - expected).sums
    others = difference.masked_fill(difference.abs() <= STEP_TIMES_FLOOR * moved, 0)
    return weight_gap(name, Sketch(expected.sums + others, gap.weight.rounding), expected, initial)


def _moved(update: Tensor, gradient: Sketch | None, perturbed: Sketch | None) -> Tensor:
    """How far rounding moves each element of a small weight: by its share of the gradient, if that is large."""
    if gradient is None or perturbed is None:
        return torch.zeros_like(update)
    changes = (perturbed - gradient).sums.abs()
    share = changes.square().mean().sqrt() / gradient.sums.abs().clamp(min=1e-30)
    share = share.where((share > IS_SMALL) & (changes > 0), 0)  # an element without a gradient has no rounding
    return (update * share).clamp(max=float(update.max()))


def _floors(reference: Reference, other: Perturbed, number: int) -> dict[Key, Gap]:
    """The changes in step `number` because of rounding errors in the weights."""
    step, expected, initial = other.steps[number], reference.steps[number], reference.initial
    floors = step_gaps(step, expected)
    for name, weight in step.weights.items():
        gap = weight_gap(name, weight - other.start[name] + initial[name], expected.weights[name], initial[name])
        floors["weight", name] = floors["replica", name] = gap
    return floors


def _gradients(reference: Reference, other: Perturbed, number: int, name: str) -> tuple[Sketch | None, Sketch | None]:
    return reference.steps[number].gradients.get(name), other.steps[number].gradients.get(name)


def _is_explained(floor: float, gradient: Sketch | None, perturbed: Sketch | None) -> bool:
    """Whether the effect of rounding on a gradient explains its effect on the update of a weight."""
    if gradient is None or perturbed is None:
        return floor <= TOLERANCE
    change = perturbed - gradient
    share = change.norm / max(gradient.norm, 1e-30)
    # The sums of a small weight are its elements: attention's key bias may be a part of a larger weight.
    rounded = float((change.sums.abs() > IS_ROUNDING * gradient.sums.abs()).double().mean())
    return not share <= IS_ROUNDING or floor <= TIMES_ROOT * math.sqrt(max(share, rounded))
