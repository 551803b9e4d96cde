"""Layers that take their sizes from the first samples, such as nn.LazyLinear."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..data.batches import fetch
from ..data.sets import MapDataset, as_numbered_step
from ..errors import UsageError
from ..seeds import CPU, restore_generators
from .engine import evaluating
from .setup import Setup


def with_sizes(setup: Setup, train_set: MapDataset) -> Setup:
    """The setup, after one forward pass of the first samples if a weight of its model has no size yet. The pass is one
    of an evaluation, so that no buffer counts it; the weights draw from the generators of the recipe, as in a loop of
    torch, and are the same in all processes.

    Raises:
        UsageError: a weight has no size after it.
    """
    if without_size(setup.model) is None:
        return setup
    epoch, ids = next(setup.plan.global_micro_batches(0))
    with restore_generators(CPU):
        batch = fetch(train_set, ids.tolist(), setup.plan.config.seed, epoch)
    with evaluating(setup.model), torch.no_grad():
        as_numbered_step(setup.forward_step)(setup.model, batch, 0)
    if name := without_size(setup.model):
        raise UsageError(
            f"{name} has no size yet, and forward_step does not use it when the model evaluates",
            "run one forward pass of a few samples before fit, or give its layer its sizes, such as nn.Linear in "
            "place of nn.LazyLinear",
        )
    return setup


def without_size(model: nn.Module) -> str | None:
    """The name of a weight or buffer of a lazy layer that has seen no samples; None if there is none."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)
