"""Lazy layers, which take their sizes from the first samples, such as nn.LazyLinear."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..data.sets import as_numbered_step
from ..errors import UsageError
from .engine import evaluating
from .setup import Setup


def with_sizes(setup: Setup) -> Setup:
    """The setup, after one forward pass of the first samples if a weight of its model has no size yet. The pass runs in
    evaluation mode, so that no buffer counts it; the weights draw from the recipe's generators, as in a plain PyTorch
    loop, and are the same in all processes. Raises UsageError if a weight still has no size afterwards."""
    if without_size(setup.model) is None:
        return setup
    batch = setup.first_batch()
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
