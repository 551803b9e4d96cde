"""Which differences are noise: no larger than what rounding errors in the weights change on one process."""

from collections.abc import Iterator

import torch
from torch import nn

from ..parallel.parts import kept_tensors
from .compare import TOLERANCE, Gap, Key, exact, step_gaps, value_gaps, weight_gap
from .reference import Reference

TIMES_FLOOR = 4  # a difference up to this many times what rounding does to one process is noise
ROUNDINGS = (1, 2, 4, 8)  # rounding errors by which the weights are moved, until the differences are explained


def without_noise(gaps: dict[Key, Gap], reference: Reference, number: int) -> dict[Key, Gap]:
    """The differences in step `number` that rounding errors do not explain."""
    is_low = reference.setup.plan.layout.precision != "float32"
    if is_low:  # a metric such as an accuracy jumps with the rounding
        gaps = {key: gap for key, gap in gaps.items() if key[0] not in ("value", "eval") or key[1] == "loss"}
    gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TOLERANCE}
    if not gaps:
        return gaps
    try:
        for floor in _floors(reference, number, is_low):
            gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TIMES_FLOOR * floor[key].size}
            if not gaps:
                break
    except Exception:  # such as too little time or memory, or a closure over the weights: the floor stays unknown
        pass
    return gaps


def _floors(reference: Reference, number: int, is_low: bool) -> Iterator[dict[Key, Gap]]:
    """What 1, 2, 4 and 8 rounding errors in the weights change. Nothing for a model with a generator or a counter of
    its own: its steps differ when they are repeated."""
    plan, alone, numbers = reference.setup.plan, reference.alone, range(min(reference.steps), number + 1)
    base, initial = alone.steps(numbers)[number], reference.initial
    if any(gap.size > TOLERANCE for gap in value_gaps(base, reference.steps[number], plan, number).values()):
        return
    for roundings in ROUNDINGS:
        moved = alone.twin()
        _move_by_rounding(moved.setup.model, roundings, is_low)
        step, start = moved.steps(numbers)[number], kept_tensors(moved.setup.model)
        floor = step_gaps(step, base, plan, number)
        for name, weight in step.weights.items():
            update = exact(weight) - exact(start[name]) + exact(initial[name])
            gap = weight_gap(name, update, base.weights[name], initial[name])
            floor["weight", name] = floor["replica", name] = gap
        yield floor


@torch.no_grad()
def _move_by_rounding(model: nn.Module, number_of_roundings: int, is_low: bool) -> None:
    """Moves each weight by so many rounding errors of its type, or with `is_low` of bfloat16, up or down at random."""
    generator = torch.Generator().manual_seed(number_of_roundings)
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            rounding = torch.finfo(torch.bfloat16 if is_low else weight.dtype).eps * number_of_roundings
            sign = torch.randint(2, weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + rounding * sign)
