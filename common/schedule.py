"""Learning-rate schedules, counted in optimizer steps."""

import math
from collections.abc import Callable
from typing import Literal, get_args

ScheduleFn = Callable[[int, int, int], float]  # (step, num_steps, warmup_steps) -> share of the peak learning rate
Schedule = Literal["constant", "linear", "cosine", "wsd", "one_cycle"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
DECAY_SHARE = 0.2  # wsd: share of the run in which the rate falls
RISE_SHARE = 0.3  # one_cycle: share of the run in which the rate rises, unless warmup_steps is given
START_FACTOR, END_FACTOR = 1 / 25, 1 / 25e4  # one_cycle: first and last rate, as shares of the peak


def learning_rate_factor(schedule: Schedule, step: int, num_steps: int, warmup_steps: int) -> float:
    """The share of the peak learning rate that optimizer step `step` uses.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`. `linear` and `cosine` then fall to zero at step
    `num_steps`. The last step is `num_steps - 1`, so no step has a rate of zero. `wsd` (warm-up, stable, decay: Hu et
    al. 2024, MiniCPM) stays at the peak and falls linearly over the last fifth of the run. `one_cycle` (Smith and Topin
    2017; torch's OneCycleLR without the momentum cycle) rises along a cosine from 1/25 of the peak. The rise takes
    `warmup_steps`, or 30 % of the run if `warmup_steps` is 0. The rate then falls along a cosine to nearly zero.

    `step`: optimizer steps already taken, from 0; `num_steps`: of the whole run.
    """
    if schedule == "one_cycle":
        peak = warmup_steps or RISE_SHARE * num_steps - 1
        if step <= peak:
            return _along_cosine(START_FACTOR, 1.0, step / peak)
        return _along_cosine(1.0, END_FACTOR, (step - peak) / max(1, num_steps - 1 - peak))
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    left = (num_steps - step) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return left
    if schedule == "cosine":
        return 0.5 * (1 - math.cos(math.pi * left))
    assert schedule in ("wsd", "constant"), schedule
    return min(1.0, (num_steps - step) / (DECAY_SHARE * num_steps)) if schedule == "wsd" else 1.0


def _along_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
