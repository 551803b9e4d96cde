"""Passes of the recipe's own `forward_step` in a world of one process, before the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..data.sets import as_numbered_step
from ..seeds import restore_generators, seed_forward
from ..step.setup import Setup
from ..weights.on_disk import with_random_weights
from .kept import kept
from .world import one_process

NUM_SAMPLES = 2  # few show what a layer mixes, and what it passes on

Forward = Callable[[nn.Module], Any]


@contextmanager
def passes_alone(setup: Setup) -> Iterator[Forward]:
    """In the `with` block, a function runs `forward_step` with a model, in a world of one process, without a gradient,
    with the same samples, random numbers and buffers each time. Weights that are still on disk are random ones.
    Afterwards the model, and all that `forward_step` refers to, are as they were."""
    device, model = setup.accelerator.device, setup.model
    forward_step, batch = as_numbered_step(setup.forward_step), setup.first_batch(NUM_SAMPLES)

    def forward(model: nn.Module) -> Any:
        with torch.no_grad():
            for buffer, value in buffers:  # such as running means, which the last pass has moved on
                buffer.copy_(value)
        seed_forward(setup.plan.config.seed, 0, 0, device)
        return forward_step(model, tree_map_only(Tensor, lambda each: each.to(device, copy=True), batch), 0)

    with (
        one_process(setup.accelerator),
        restore_generators(device),
        with_random_weights(model),
        kept(model, setup.optimizer, [setup.forward_step], device),
        torch.no_grad(),
    ):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        model.train()  # what draws random numbers shows
        yield forward
