"""What it costs to compare the weights of the processes: milliseconds of a comparison, and its share of a step.

    accelerate launch --config_file accelerate_configs/ddp.yaml benchmarks/replicas.py --size 134m

Trains a Llama of benchmarks/llama.py, and compares after every second step. A comparison adds up the bits of all
weights; the message travels with that of the record.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from llama import Config, main

from accelerate_recipes import run
from accelerate_recipes.common.step.engine import Engine
from accelerate_recipes.common.step.replicas import Replicas

SECONDS: dict[str, list[float]] = {"step": [], "comparison": []}


def timed(kind: str, function: Callable[..., Any]) -> Any:
    """The function; the seconds of each call go to SECONDS."""

    def call(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **options)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        SECONDS[kind].append(time.perf_counter() - started)
        return result

    return call


def measure(config: Config) -> None:
    config.log_every, config.check_steps, config.max_steps = 2, 0, config.max_steps or 10
    Engine.step, Replicas.bits = timed("step", Engine.step), timed("comparison", Replicas.bits)
    main(config)
    step, comparison = (median(SECONDS[kind][1:]) for kind in ("step", "comparison"))
    print(f"a comparison takes {1e3 * comparison:.1f} ms, {100 * comparison / step:.2f} % of a step of {step:.2f} s")


if __name__ == "__main__":
    run(measure, Config)
