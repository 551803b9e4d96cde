"""Prints plans."""

import math
from collections.abc import Sequence
from typing import Any

from accelerate_recipes.console import print_table
from accelerate_recipes.plan.hardware import Gpu

Plan = dict[str, Any]


def why_not(answer: Plan) -> str:
    """Why there is no plan."""
    if lines := answer.get("refused"):
        return f"the run would be refused: {lines[0]}"
    return f"no dry run of this recipe under {answer['config']}: {answer['failed']}"


def show_one(plan: Plan, gpu: Gpu) -> None:
    """Prints all about a plan."""
    machines, per_gpu = plan["num_machines"], plan["tokens_per_second_per_gpu"]
    tokens = f", {per_gpu:,.4g} tokens/s per GPU" if per_gpu else ""
    accumulated = f" × {plan['accumulation']} accumulated" * (plan["accumulation"] > 1)
    rest = max(0, plan["peak"] - plan["weights"] - plan["gradients"] - plan["optimizer"])
    forward = f"; a forward pass adds {in_bytes(plan['forward'])}" * (plan["forward"] > 0)
    epochs = plan["num_steps"] / plan["steps_per_epoch"]
    rows = {
        "config": f"{plan['config']}: {plan['layout']}, {plan['precision']}, {_processes(plan['num_processes'])}",
        "machines": str(machines),
        "set in it": ", ".join(f"{key}: {value}" for key, value in plan["settings"].items()),
        "batch": f"{plan['batch_size']} = {plan['data_parallel']} × {plan['micro_batch_size']}{accumulated}",
        "run": f"{plan['num_steps']:,} steps, {epochs:.3g} epochs of {plan['num_samples']:,} samples",
        "learning rate": ", ".join(
            f"{rate:.3g} in step {int(step) + 1:,}" for step, rate in plan["learning_rates"].items()
        ),
        "first steps": _check(plan),
        "checkpoints": _checkpoints(plan),
        "weights": f"{in_bytes(plan['weights'])} in each process",
        "gradients": in_bytes(plan["gradients"]),
        "optimizer": in_bytes(plan["optimizer"]),
        "beside them": f"{in_bytes(rest)} of activations and buffers, at the peak{forward}",
        "peak": f"{in_bytes(plan['peak'])} of {in_bytes(gpu.usable)}: {'fits' if plan['fits'] else 'DOES NOT FIT'}",
        "sends": f"{in_bytes(plan['sent']['link'])} a step and process inside a machine, "
        f"{in_bytes(plan['sent']['network'])} between machines",
        "step": f"{_seconds(plan['seconds'])}, of which {_seconds(plan['waits'])} waiting for other processes",
        "speed": f"{plan['samples_per_second']:,.4g} samples/s{tokens}, {plan['mfu']:.1%} MFU",
        "time": f"{_hours(plan['hours'])}, {plan['gpu_hours']:,.3g} GPU hours",
    }
    for name, value in rows.items():
        if value:
            print(f"{name:<14}{value}")


def show_fitting(near: Sequence[tuple[str, Plan]], name: str) -> None:
    """Prints what to type instead of a plan that does not fit, or that accumulates more than it must."""
    advice = "; or ".join(
        f"{text} ({in_bytes(plan['peak'])}, {_seconds(plan['seconds'])} a step)" for text, plan in near
    )
    print(f"{name:<14}{advice or 'nothing that was tried: use more GPUs, or a smaller model'}")


def show_several(plans: Sequence[Plan]) -> None:
    """Prints a row for each plan, and a line for each config without one."""
    print_table(
        ("config", "layout", "peak", "fits", "step", "waits", "samples/s", "MFU", "time", "GPU hours"),
        [
            (
                plan["config"],
                plan["layout"],
                in_bytes(plan["peak"]),
                "yes" if plan["fits"] else "no",
                *_speed(plan),
                f"{plan['mfu']:.1%}",
                _hours(plan["hours"]),
                f"{plan['gpu_hours']:,.3g}",
            )
            for plan in plans
            if "peak" in plan
        ],
    )
    for plan in plans:
        if "peak" not in plan:
            print(f"{plan['config']}: {why_not(plan)}")


def show_scaling(configs: dict[str, list[Plan]]) -> None:
    """Prints each config with more and more GPUs."""
    rows = [
        (
            config,
            f"{row['num_processes']:,}",
            *_speed(row),
            f"{row['efficiency']:.0%}",
            _hours(row["hours"]),
            f"{row['gpu_hours']:,.3g}",
        )
        for config, steps in configs.items()
        for row in steps
    ]
    if rows:
        print("\nMore GPUs, each with as many samples a step as above (so the batch grows):")
        print_table(("config", "GPUs", "step", "waits", "samples/s", "efficiency", "time", "GPU hours"), rows)
    for config, steps in configs.items():
        if half := next((row["num_processes"] for row in steps if row["waits"] > row["seconds"] / 2), None):
            print(f"{config}: from {half:,} GPUs on, a process waits for more than half of a step")


def show_cheapest(rows: Sequence[tuple[str, Plan]], hours: float | None) -> None:
    """Names the row with the fewest GPU hours of those that end in time."""
    in_time = [(config, row) for config, row in rows if hours is None or row["hours"] <= hours]
    if not in_time:
        print(f"\nnothing here ends in {hours:g} hours: type --scaling, or another --hours")
        return
    config, row = min(in_time, key=lambda pair: (pair[1]["gpu_hours"], pair[1]["hours"]))
    limit = "" if hours is None else f" that ends in {hours:g} hours"
    print(f"\ncheapest{limit}: {config} on {row['num_processes']:,} GPUs, {row['gpu_hours']:,.3g} GPU hours")


def in_bytes(number: float) -> str:
    """A number of bytes with three digits and a unit of powers of 1,000."""
    units = ["B", "kB", "MB", "GB", "TB"]
    power = min(len(units) - 1, int(math.log10(number) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {units[power]}"


def _speed(row: Plan) -> tuple[str, str, str]:
    return _seconds(row["seconds"]), f"{row['waits'] / row['seconds']:.0%}", f"{row['samples_per_second']:,.4g}"


def _check(plan: Plan) -> str:
    """Whether one process repeats them (docs/check.md)."""
    if not plan["check_steps"]:
        return ""
    reason = plan["why_not_checked"]
    if reason is None and plan["check_seconds"] > plan["longest_check"]:
        reason = f"that would take about {_seconds(plan['check_seconds'])}, more than {plan['longest_check']:g} s"
    if reason is not None:
        return f"not checked against one process: {reason}"
    return f"{plan['check_steps']} checked against one process, in about {_seconds(plan['check_seconds'])}"


def _checkpoints(plan: Plan) -> str:
    size = in_bytes(plan["saved"])
    if not plan["save_every"]:
        return f"none: type --save_every; each would have {size}"
    return f"{size} every {plan['save_every']:,} steps, {plan['keep_checkpoints']} kept"


def _processes(number: int) -> str:
    return f"{number:,} process{'es' * (number > 1)}"


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 1 else f"{number * 1000:.3g} ms"


def _hours(number: float) -> str:
    if number < 1 / 60:
        return _seconds(number * 3600)
    return f"{number:,.3g} hours" if number >= 1 else f"{number * 60:.3g} min"
