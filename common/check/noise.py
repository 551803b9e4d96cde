"""Which differences are noise: no larger than what rounding errors in the weights change on one process."""

import torch
from torch import nn

from .alone import Step, sketches
from .compare import TOLERANCE, Gap, Key, step_gaps, value_gaps, weight_gap
from .copies import NotChecked
from .reference import Moved, Reference
from .sketch import Sketch

TIMES_FLOOR = 4  # a difference up to this many times what rounding does to one process is noise
ROUNDINGS = (1, 2, 4, 8)  # rounding errors by which the weights are moved, until the differences are explained


def without_noise(gaps: dict[Key, Gap], reference: Reference, number: int) -> dict[Key, Gap]:
    """The differences in step `number` that rounding errors do not explain."""
    is_low = reference.setup.plan.layout.precision != "float32"
    if is_low:  # a metric such as an accuracy jumps with the rounding
        gaps = {key: gap for key, gap in gaps.items() if key[0] not in ("value", "eval") or key[1] == "loss"}
    gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TOLERANCE}
    try:
        for roundings in ROUNDINGS:
            if not gaps:
                break
            floor = _floor(reference, number, roundings, is_low)
            gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TIMES_FLOOR * floor[key].size}
    except Exception:  # such as too little time or memory, or a closure over the weights: the floor stays unknown
        pass
    return gaps


def _floor(reference: Reference, number: int, roundings: int, is_low: bool) -> dict[Key, Gap]:
    """What so many rounding errors in the weights change in step `number`.

    Raises NotChecked for a model with a generator or a counter of its own: its steps differ when they are repeated.
    """
    if roundings not in reference.moved:
        start: dict[str, Sketch] = {}

        def move(model: nn.Module) -> None:
            _move_by_rounding(model, roundings, is_low)
            start.update(sketches(model))

        numbers = range(min(reference.steps), max(reference.steps) + 1)
        moved, base = reference.alone.steps(numbers, move), reference.steps
        if not _is_like(moved, base, reference, with_norm=True):  # in bf16, and if the copies lack hooks
            base = reference.alone.steps(numbers)
            if not _is_like(base, reference.steps, reference, with_norm=False):
                raise NotChecked("its steps differ when they are repeated")
        reference.moved[roundings] = Moved(moved, start, base)
    found = reference.moved[roundings]
    step, alone, initial = found.steps[number], found.base[number], reference.initial
    floor = step_gaps(step, alone, reference.setup.plan, number)
    for name, weight in step.weights.items():
        gap = weight_gap(name, weight - found.start[name] + initial[name], alone.weights[name], initial[name])
        floor["weight", name] = floor["replica", name] = gap
    return floor


def _is_like(steps: dict[int, Step], others: dict[int, Step], reference: Reference, with_norm: bool) -> bool:
    """Whether the first of these steps has the values of the other, and the norm of the gradient."""
    first, gaps_of = min(others), step_gaps if with_norm else value_gaps
    gaps = gaps_of(steps[first], others[first], reference.setup.plan, first)
    return all(gap.size <= TOLERANCE for gap in gaps.values())


@torch.no_grad()
def _move_by_rounding(model: nn.Module, number_of_roundings: int, is_low: bool) -> None:
    """Moves each weight by so many rounding errors of its type, or with `is_low` of bfloat16, up or down at random."""
    generator = torch.Generator().manual_seed(number_of_roundings)
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            rounding = torch.finfo(torch.bfloat16 if is_low else weight.dtype).eps * number_of_roundings
            sign = torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            weight.mul_((sign.to(weight.dtype) * rounding).add_(1).to(weight.device))
