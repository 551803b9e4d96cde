"""DeepSpeed's ZeRO by formulas: its own code, which fuses and copies, does not run on tensors without data.

Source: Rajbhandari et al. 2020 for the shares; the buffers as benchmarks/memory.py measures them.
"""

from typing import Any

BUCKET = 50_000_000  # values; see configure() in common/parallel/deepspeed.py
LIVE = 1_000_000_000  # values that ZeRO-3 gathers at most: DeepSpeed's stage3_max_live_parameters
PARTS = 16  # in which ZeRO-3's gathers are spread over a step, for its time


def divided(one: dict[str, Any]) -> dict[str, Any]:
    """The answer for all processes, from that of the undivided model in one process.

    Args:
        one: from dry.py, of a model in the run's precision.
    """
    stage, number, offloads = one["zero_stage"], one["num_processes"], one["offloads"]
    values, whole = one["trained"], one["weights"]
    width = 2 if one["precision"] == "bf16" else 4  # bytes of a value in the model
    bucket = min(values, BUCKET) * width
    gradients = 4 * values / number
    copy = 0 if offloads else 4 * values / number  # in float32, which the optimizer updates
    state = 0 if offloads else one["optimizer"] * 4 / width / number
    passes = one["peak"] - one["weights"] - one["optimizer"]  # gradients and activations
    if stage == 1:
        weights, buffers = whole + copy, bucket + passes
    elif stage == 2:
        weights, buffers = whole + copy, bucket + max(one["forward"], min(passes, one["forward"] + gradients + bucket))
    else:
        weights = whole / number + copy + gradients + bucket
        gathered = min(values, LIVE) * width + (number - 1) / number * bucket
        buffers = gradients + gathered + one["forward"]
    return one | {
        "weights": weights,
        "gradients": gradients,
        "optimizer": state,
        "peak": weights + state + buffers,
        "first": _sent(one["first"], stage, values, width, number),
        "more": _sent(one["more"], stage, values, width, number),
    }


def _sent(events: list[Any], stage: int, values: int, width: int, number: int) -> list[Any]:
    """The events of a step, with ZeRO's collectives: 2 Ψ values for stages 1 and 2, 3 Ψ for stage 3."""
    group, seconds = [0, number, 1], sum(event[1] for event in events if event[0] == "compute")
    if stage < 3:
        passes = [["compute", seconds], ["reduce_scatter", 4 * values, group, True]]
        return [*passes, ["all_gather", width * values, group, False]]
    result: list[Any] = []
    for part in range(PARTS):
        result.append(["all_gather", 2 * width * values / PARTS, group, True])
        result.append(["compute", seconds / PARTS])
        if part >= PARTS // 3:  # the backward pass
            result.append(["reduce_scatter", 4 * values / (PARTS - PARTS // 3), group, True])
    return result
