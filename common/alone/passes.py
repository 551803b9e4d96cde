"""Passes of the recipe's own `forward_step` in a world of one process, before the run."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ..data.sets import as_numbered_step
from ..seeds import CPU, restore_generators, seed_forward
from ..step.setup import Setup
from ..weights.on_disk import with_random_weights
from .kept import kept
from .world import one_process

TAKES_SHAPE = re.compile(r"::new_|_like$")  # the name of an operation that does not look at values
NUM_SAMPLES = 2  # few show what a layer mixes, and what it passes on

Forward = Callable[[nn.Module], Any]


def device_for_passes(setup: Setup) -> torch.device:
    """The device on which the whole model takes passes: the CPU, if a GPU has too little memory for it."""
    device, num_bytes = setup.accelerator.device, sum(weight.nbytes for weight in setup.model.parameters())
    is_large = device.type != "cpu" and 2 * num_bytes > torch.get_device_module(device).mem_get_info(device)[0]
    return CPU if is_large else device


@contextmanager
def passes_alone(setup: Setup) -> Iterator[Forward]:
    """In the `with` block, a function runs `forward_step` with a model, in a world of one process, without a gradient,
    with the same samples, random numbers and buffers each time. Weights that are still on disk are random ones.
    Afterwards the model, and all that `forward_step` refers to, are as they were."""
    device, model = device_for_passes(setup), setup.model
    forward_step, batch = as_numbered_step(setup.forward_step), setup.first_batch(NUM_SAMPLES)

    def forward(model: nn.Module) -> Any:
        for buffer, value, version in buffers:
            if buffer._version > version:  # a pass has moved it on, as a running mean
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
        buffers = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]
        model.train()  # what draws random numbers shows
        yield forward


class Trace(TorchDispatchMode):
    """Follows what operations compute from some tensors, such as weights.

    Attributes:
        origins: {tensor: what it was computed from}; to be filled with those to follow. A caller may end a trail.
        used: what all that operations got was computed from. A caller may begin anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins, self.used = WeakTensorKeyDictionary(), set[Any]()

    def of(self, values: Iterable[Any]) -> frozenset[Any]:
        """What these values were computed from."""
        return frozenset().union(*(self.origins.get(each, ()) for each in values if isinstance(each, Tensor)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if (origins := self.of(given)) and not TAKES_SHAPE.search(function._schema.name):
            self.used |= origins
            written = given[:1] if function._schema.is_mutable else []
            for each in (*tree_leaves(result), *written):
                if isinstance(each, Tensor):
                    self.origins[each] = origins
        return result

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None:  # it keeps this object, whose weak references keep a weight from giving back what it lent
            self.origins.clear()


def is_same(found: Any, expected: Any) -> bool:
    """Whether two values of passes are the same but for rounding errors, which change less than half of the digits."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return type(found) is type(expected)
    if found.shape != expected.shape or not found.is_floating_point():
        return torch.equal(found, expected)
    largest = expected.where(expected.isfinite(), 0).abs().max().item() if expected.numel() else 0.0
    tolerance = math.sqrt(torch.finfo(found.dtype).eps) / 4 * largest
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
