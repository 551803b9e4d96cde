"""Which differences are noise: no larger than what rounding errors in the weights change on one process."""

from .alone import Step
from .compare import TOLERANCE, Gap, Key, step_gaps, weight_gap
from .copies import NotChecked
from .reference import ROUNDINGS, Moved, Reference

TIMES_FLOOR = 4  # a difference up to this many times what rounding does to one process is noise


def without_noise(gaps: dict[Key, Gap], reference: Reference, number: int) -> dict[Key, Gap]:
    """The differences in step `number` that rounding errors do not explain."""
    is_low = reference.alone.setup.plan.layout.precision != "float32"
    if is_low:  # a metric such as an accuracy jumps with the rounding
        gaps = {key: gap for key, gap in gaps.items() if key[0] not in ("value", "eval") or key[1] == "loss"}
    gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TOLERANCE}
    try:
        for roundings in ROUNDINGS:
            if not gaps:
                break
            floor = _floor(reference, number, roundings)
            gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TIMES_FLOOR * floor[key].size}
    except Exception:  # such as too little time or memory, or a closure over the weights: the floor stays unknown
        pass
    return gaps


def _floor(reference: Reference, number: int, roundings: int) -> dict[Key, Gap]:
    """What so many rounding errors in the weights change in step `number`.

    Raises NotChecked for a model with a generator or a counter of its own: its steps differ when they are repeated.
    """
    if roundings not in reference.moved:
        reference.moved[roundings] = Moved.taken(reference.alone, [*reference.steps], roundings)
    found, base = reference.moved[roundings], reference.repeated or reference.steps
    if not _is_like(found.steps, base, reference, with_norm=True):  # in bf16, and if the copies lack hooks
        base = reference.repeated = reference.repeated or reference.alone.steps([*reference.steps])
        if not _is_like(base, reference.steps, reference, with_norm=False):
            raise NotChecked("its steps differ when they are repeated")
    step, alone, initial = found.steps[number], base[number], reference.initial
    floor = step_gaps(step, alone, reference.alone.setup.plan, number)
    for name, weight in step.weights.items():
        gap = weight_gap(name, weight - found.start[name] + initial[name], alone.weights[name], initial[name])
        floor["weight", name] = floor["replica", name] = gap
    return floor


def _is_like(steps: dict[int, Step], others: dict[int, Step], reference: Reference, with_norm: bool) -> bool:
    """Whether the first of these steps has the values of the other, and the norm of the gradient."""
    first = min(others)
    gaps = step_gaps(steps[first], others[first], reference.alone.setup.plan, first)
    return all(gap.size <= TOLERANCE for key, gap in gaps.items() if with_norm or key[0] != "norm")
