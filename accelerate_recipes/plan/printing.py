"""Prints plans."""

import math
from collections.abc import Sequence

from accelerate_recipes.console import print_table
from accelerate_recipes.plan.estimates import Estimate, NoPlan, Speed
from accelerate_recipes.plan.hardware import Gpu


def why_not(answer: NoPlan) -> str:
    if answer.refused:
        return f"the run would be refused: {answer.refused[0]}"
    return f"no dry run of this recipe under {answer.config}: {answer.failed}"


def show_one(plan: Estimate, gpu: Gpu) -> None:
    """Prints all facts about a plan."""
    run, step, speed = plan.run, plan.step, plan.speed
    tokens = f", {per_gpu:,.4g} tokens/s per GPU" if (per_gpu := speed.tokens_per_second_per_gpu) else ""
    accumulated = f" × {run.accumulation} accumulated" * (run.accumulation > 1)
    rest = max(0, step.peak - step.weights - step.gradients - step.optimizer)
    forward = f"; a forward pass adds {in_bytes(step.forward)}" * (step.forward > 0)
    epochs, processes = run.num_steps / run.steps_per_epoch, f"process{'es' * (run.num_processes > 1)}"
    rows = {
        "config": f"{plan.config}: {run.layout}, {run.precision}, {run.num_processes:,} {processes}",
        "machines": str(run.num_machines),
        "set in it": ", ".join(f"{key}: {value}" for key, value in plan.settings.items()),
        "batch": f"{run.batch_size} = {run.data_parallel} × {run.micro_batch_size}{accumulated}",
        "pipeline": f"{run.idle:.0%} of a step idle; activations of at most {run.live:g} micro-batches in a process"
        * (run.stages > 1),
        "run": f"{run.num_steps:,} steps, {epochs:.3g} epochs of {run.num_samples:,} samples",
        "learning rate": ", ".join(
            f"{rate:.3g} in step {int(number) + 1:,}" for number, rate in run.learning_rates.items()
        ),
        "first steps": _check(plan),
        "checkpoints": f"{in_bytes(step.saved)} every {run.save_every:,} steps, {run.keep_checkpoints} kept"
        if run.save_every
        else f"none: use --save_every; each would have {in_bytes(step.saved)}",
        "weights": f"{in_bytes(step.weights)} in each process",
        "gradients": in_bytes(step.gradients),
        "optimizer": in_bytes(step.optimizer),
        "beside them": f"{in_bytes(rest)} of activations and buffers, at the peak{forward}",
        "peak": f"{in_bytes(step.peak)} of {in_bytes(gpu.usable)}: {'fits' if plan.fits else 'DOES NOT FIT'}",
        "sends": f"{in_bytes(plan.sent.link)} per step and process inside a machine, "
        f"{in_bytes(plan.sent.network)} between machines",
        "step": f"{_seconds(speed.seconds)}; {_seconds(speed.waits)} of it waiting for other processes",
        "speed": f"{speed.samples_per_second:,.4g} samples/s{tokens}, {speed.mfu:.1%} MFU",
        "time": f"{_hours(speed.hours)}, {speed.gpu_hours:,.3g} GPU hours",
    }
    for name, value in rows.items():
        if value:
            print(f"{name:<14}{value}")


def show_fitting(near: Sequence[tuple[str, Estimate]], name: str) -> None:
    """Prints what to type instead of a plan that does not fit, or that accumulates more than it must."""
    advice = "; or ".join(
        f"{text} ({in_bytes(plan.step.peak)}, {_seconds(plan.speed.seconds)} a step)" for text, plan in near
    )
    print(f"{name:<14}{advice or 'no setting that plan tried fits: use more GPUs, or a smaller model'}")


def show_several(plans: Sequence[Estimate | NoPlan]) -> None:
    """Prints a row for each plan, and a line for each config without one."""
    rows = []
    for plan in plans:
        if isinstance(plan, Estimate):
            cells = plan.config, plan.run.layout, in_bytes(plan.step.peak), "yes" if plan.fits else "no"
            rows.append((*cells, *_speed(plan.speed, f"{plan.speed.mfu:.1%}")))
    print_table(("config", "layout", "peak", "fits", "step", "waits", "samples/s", "MFU", "time", "GPU hours"), rows)
    for plan in plans:
        if isinstance(plan, NoPlan):
            print(f"{plan.config}: {why_not(plan)}")


def show_scaling(configs: dict[str, list[Speed]]) -> None:
    """Prints each config with more and more GPUs."""
    rows = [
        (config, f"{row.num_processes:,}", *_speed(row, f"{row.efficiency:.0%}"))
        for config, steps in configs.items()
        for row in steps
    ]
    if rows:
        print("\nMore GPUs, each with as many samples a step as above (so the batch grows):")
        print_table(("config", "GPUs", "step", "waits", "samples/s", "efficiency", "time", "GPU hours"), rows)
    for config, steps in configs.items():
        if half := next((row.num_processes for row in steps if row.waits > row.seconds / 2), None):
            print(f"{config}: from {half:,} GPUs on, a process waits for more than half of a step")


def show_cheapest(rows: Sequence[tuple[str, Speed]], hours: float | None) -> None:
    """Names the row with the fewest GPU hours, among rows that end in time."""
    if not (in_time := [(config, row) for config, row in rows if hours is None or row.hours <= hours]):
        print(f"\nnothing here finishes in {hours:g} hours: use --scaling, or another --hours")
        return
    config, row = min(in_time, key=lambda pair: (pair[1].gpu_hours, pair[1].hours))
    limit = "" if hours is None else f" that ends in {hours:g} hours"
    print(f"\ncheapest{limit}: {config} on {row.num_processes:,} GPUs, {row.gpu_hours:,.3g} GPU hours")


def in_bytes(number: float) -> str:
    """A number of bytes with three digits and a unit of powers of 1,000."""
    units = ["B", "kB", "MB", "GB", "TB"]
    power = min(len(units) - 1, int(math.log10(number) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {units[power]}"


def _speed(row: Speed, share: str) -> tuple[str, ...]:
    """The cells of a table: a step, how much of it waits, samples/s, a share, the time and the GPU hours of the run."""
    cells = _seconds(row.seconds), f"{row.waits / row.seconds:.0%}", f"{row.samples_per_second:,.4g}"
    return *cells, share, _hours(row.hours), f"{row.gpu_hours:,.3g}"


def _check(plan: Estimate) -> str:
    """Whether one process repeats the first steps (docs/check.md)."""
    run = plan.run
    if not run.check_steps:
        return ""
    reason = run.why_not_checked
    if reason is None and plan.check_seconds > run.longest_check:
        reason = f"that would take about {_seconds(plan.check_seconds)}, more than {run.longest_check:g} s"
    if reason is not None:
        return f"not checked against one process: {reason}"
    return f"{run.check_steps} checked against one process, in about {_seconds(plan.check_seconds)}"


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 1 else f"{number * 1000:.3g} ms"


def _hours(number: float) -> str:
    if number < 1 / 60:
        return _seconds(number * 3600)
    return f"{number:,.3g} hours" if number >= 1 else f"{number * 60:.3g} min"
