"""Learning-rate schedules, counted in optimizer steps."""

import math


def learning_rate_factor(schedule: str, step: int, num_steps: int, warmup_steps: int) -> float:
    """The share of the peak learning rate that optimizer step `step` uses.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`. `linear` and `cosine` then
    fall so that they would reach zero at step `num_steps`, the first one not taken: no step is
    spent on a rate of zero.

    Args:
        schedule: "constant", "linear" or "cosine".
        step: optimizer steps already taken, from 0 to num_steps - 1.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps below the peak at the start.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    assert schedule == "constant", schedule
    return 1.0
