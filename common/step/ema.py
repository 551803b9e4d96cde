"""A moving average of the weights, evaluated and exported instead of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..weights.shards import TensorReader, local, read_like


class EMA:
    """average <- decay × average + (1 - decay) × weights, after each optimizer step.

    The decay rises to its value along (1 + updates) / (10 + updates), to reduce the influence of the random initial
    weights (as in TensorFlow's ExponentialMovingAverage). Each process averages the weights, or shards of weights, that
    its optimizer updates. Buffers are not averaged. `after_swap` is called when the weights have been swapped.
    """

    def __init__(self, weights: Iterable[Tensor], decay: float, after_swap: Callable[[], None]):
        self.decay, self.num_updates, self._after_swap = decay, 0, after_swap
        self.averages: dict[Tensor, Tensor] = {weight: weight.detach().clone() for weight in weights}

    @torch.no_grad()
    def update(self) -> None:
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages, weights = ([local(tensor) for tensor in part] for part in (self.averages.values(), self.averages))
        if averages:  # not in a stage of a pipeline that is frozen
            torch._foreach_lerp_(averages, weights, 1 - decay)

    def load(self, saved: Mapping[str, Tensor], reader: TensorReader) -> None:
        """Restores the averages of these weights that a checkpoint has."""
        for name, weight in saved.items():
            if f"average.{name}" in reader.tensors:
                self.averages[weight] = read_like(weight, reader, f"average.{name}")

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Replaces the weights with the averages until the end of the `with` block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in self.averages.items():
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)
        self._after_swap()
