"""A moving average of the weights, evaluated and exported instead of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .parts import local


class EMA:
    """average <- decay × average + (1 - decay) × weights, after each optimizer step.

    The decay rises to its value along (1 + updates) / (10 + updates), to reduce the influence of the
    random initial weights (as in TensorFlow's ExponentialMovingAverage). Each process averages the
    weights, or shards of weights, in its optimizer. Buffers are not averaged.

    Args:
        optimizer: over the parameters to average.
        decay: between 0 and 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self.decay, self.num_updates = decay, 0
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.averages: dict[Tensor, Tensor] = {weight: weight.detach().clone() for weight in weights}

    @torch.no_grad()
    def update(self) -> None:
        """Updates the averages with the current weights, after an optimizer step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages, weights = ([local(tensor) for tensor in part] for part in (self.averages.values(), self.averages))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replaces the weights of `model` with the averages until the end of the `with` block."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for weight, average in self.averages.items():
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)
        # After an evaluation FSDP2 keeps the gathered weights of the outermost module for a backward pass.
        for module in model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()
