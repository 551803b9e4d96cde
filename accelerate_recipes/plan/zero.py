"""DeepSpeed's ZeRO as formulas: its own code fuses and copies, and does not run on tensors without data. Sources:
Rajbhandari et al. 2020 for the shares, and benchmarks/memory.py, which measures the buffers."""

from dataclasses import replace

from accelerate_recipes.plan.estimates import Collective, Event, Group, RunFacts, StepFacts

BUCKET = 50_000_000  # values; see configure() in common/parallel/deepspeed.py
LIVE = 1_000_000_000  # values that ZeRO-3 gathers at most: DeepSpeed's stage3_max_live_parameters
PARTS = 16  # of a step; ZeRO-3's gathers are spread over them


def divide(one: StepFacts, run: RunFacts) -> StepFacts:
    """The step of one of many processes, from that of a process with the whole model; unchanged without DeepSpeed."""
    if one.zero is None:
        return one
    stage, number, offloads = one.zero.zero_stage, run.num_processes, one.zero.offloads
    values, whole = one.zero.trained, one.weights
    width = 2 if run.precision == "bf16" else 4  # bytes of a value in the model
    bucket = min(values, BUCKET) * width
    gradients = 4 * values / number
    copy = 0 if offloads else 4 * values / number  # in float32, which the optimizer updates
    state = 0 if offloads else one.optimizer * 4 / width / number
    passes = one.peak - one.weights - one.optimizer  # gradients and activations
    if stage == 1:
        weights, buffers = whole + copy, bucket + passes
    elif stage == 2:
        weights, buffers = whole + copy, bucket + max(one.forward, min(passes, one.forward + gradients + bucket))
    else:
        weights = whole / number + copy + gradients + bucket
        buffers = gradients + min(values, LIVE) * width + (number - 1) / number * bucket + one.forward
    return replace(
        one,
        weights=weights,
        gradients=gradients,
        optimizer=state,
        peak=weights + state + buffers,
        first=_with_collectives(one.first, stage, values, width, number),
        more=_with_collectives(one.more, stage, values, width, number),
    )


def _with_collectives(events: list[Event], stage: int, values: int, width: int, number: int) -> list[Event]:
    """The events of a step, with ZeRO's collectives: 2 Ψ values for stages 1 and 2, 3 Ψ for stage 3."""
    group, seconds = Group(0, number, 1), sum((event for event in events if isinstance(event, float)), 0.0)
    scattered, gathered = Collective("reduce_scatter", 4 * values, group, True), width * values
    if stage < 3:
        return [seconds, scattered, Collective("all_gather", gathered, group, False)]
    result: list[Event] = []
    for part in range(PARTS):
        result += [Collective("all_gather", 2 * gathered / PARTS, group, True), seconds / PARTS]
        if part >= PARTS // 3:  # the backward pass
            result.append(scattered._replace(num_bytes=4 * values / (PARTS - PARTS // 3)))
    return result
