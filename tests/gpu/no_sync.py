"""Runs the recipe that RECIPE names, and fails if a step makes the CPU wait for the GPU, from step 3 to step 17."""

import os
import runpy
from typing import Any

import torch
from torch import nn

from accelerate_recipes import run
from accelerate_recipes.common.data import Batch

FIRST, END = 3, 18


def main(config: Any) -> None:
    num_passes = 0

    def watched_step(model: nn.Module, batch: Batch) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes in (FIRST, END) and torch.cuda.is_available():  # without a GPU the passes are counted alone
            torch.cuda.set_sync_debug_mode("error" if num_passes == FIRST else "default")
        return forward_step(model, batch)

    names = recipe["main"].__globals__
    forward_step, names["forward_step"] = names["forward_step"], watched_step
    recipe["main"](config)
    assert num_passes >= END


if __name__ == "__main__":
    recipe = runpy.run_path(os.environ["RECIPE"])
    run(main, recipe["Config"])
