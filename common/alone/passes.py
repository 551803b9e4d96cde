"""Runs forward_step as in `python recipe.py`: torch.distributed and the environment show it one process."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ..data.sets import as_numbered_step
from ..environment import without_ranks
from ..seeds import CPU, restore_generators, seed_forward
from ..step.setup import Setup
from ..weights.on_disk import with_random_weights
from .kept import kept

TAKES_SHAPE = re.compile(r"::new_|_like$")  # names of operations that use a tensor's shape, not its values
NUM_SAMPLES = 2  # few are enough to show what a layer mixes and passes on

Forward = Callable[[nn.Module], Any]
ALONE = {"num_processes": 1, "process_index": 0, "local_process_index": 0, "distributed_type": DistributedType.NO}


@contextmanager
def one_process(accelerator: Accelerator) -> Iterator[None]:
    """In the `with` block, Accelerate, torch.distributed and the environment look like those of a single process."""
    states = PartialState._shared_state, AcceleratorState._shared_state
    of_all, own = (patch.dict(state, {name: ALONE[name] for name in ALONE if name in state}) for state in states)
    with _group_of_one(accelerator), without_ranks(), of_all, own:
        yield


@contextmanager
def _group_of_one(accelerator: Accelerator) -> Iterator[None]:
    if not dist.is_initialized():
        yield
        return
    groups = dist.distributed_c10d._world  # torch 2.14 would count this group, and name later ones by the count
    count = groups.group_count
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    groups.group_count = count
    world, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    answers: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
    functions: dict[str, Any] = {name: _noting(accelerator, name, answer) for name, answer in answers.items()}
    try:
        with patch.multiple(dist, **functions):
            yield
    finally:
        dist.GroupMember.WORLD = world
        dist.destroy_process_group(group)


def _noting(accelerator: Accelerator, name: str, answer: Any) -> Callable:
    """Replaces a function of torch.distributed, and records who calls it."""
    function = getattr(dist, name)

    def asked(group: Any = None) -> Any:
        if hasattr(accelerator, "note"):  # the accelerator of `start`
            accelerator.note(f"torch.distributed.{name}")
        return answer if group is None else function(group)

    return asked


def device_for_passes(setup: Setup) -> torch.device:
    """The device for passes of the whole model: the CPU, if a GPU has too little memory for it."""
    device, num_bytes = setup.accelerator.device, sum(weight.nbytes for weight in setup.model.parameters())
    is_large = device.type != "cpu" and 2 * num_bytes > torch.get_device_module(device).mem_get_info(device)[0]
    return CPU if is_large else device


@contextmanager
def passes_alone(setup: Setup) -> Iterator[Forward]:
    """In the `with` block, a function runs `forward_step` with a model: in a world of one process, without gradients,
    and with the same samples, random numbers and buffers each time. Weights that are still on disk get random values.
    Afterwards the model, and everything that `forward_step` refers to, are as before."""
    device, model = device_for_passes(setup), setup.model
    forward_step, batch = as_numbered_step(setup.forward_step), setup.first_batch(NUM_SAMPLES)

    def forward(model: nn.Module) -> Any:
        for buffer, value, version in buffers:
            if buffer._version > version:  # a pass has updated it, such as a running mean
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
        model.train()  # shows whether layers draw random numbers
        yield forward


class OperationTrace(TorchDispatchMode):
    """Traces what operations compute from some tensors, such as weights. `origins`: {tensor: what it was computed
    from}; a caller adds the tensors to trace, and may remove others. `used`: the origins of everything that operations
    got; a caller may clear it."""

    def __init__(self) -> None:
        super().__init__()
        self.origins, self.used = WeakTensorKeyDictionary(), set[Any]()

    def of(self, values: Iterable[Any]) -> frozenset[Any]:
        return frozenset().union(*(self.origins.get(each, ()) for each in values if isinstance(each, Tensor)))

    def mark(self, values: Any, origins: frozenset[Any]) -> None:
        """Records that these values were computed from `origins`."""
        for each in tree_leaves(values):
            if isinstance(each, Tensor):
                self.origins[each] = origins

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if (origins := self.of(given)) and not TAKES_SHAPE.search(function._schema.name):
            self.used |= origins
            self.mark((result, given[:1] if function._schema.is_mutable else []), origins)
        return result

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None:  # the error keeps this object alive, and torch cannot swap tensors with weak references
            self.origins.clear()


def is_same(found: Any, expected: Any) -> bool:
    """Whether two values of passes are equal up to rounding errors, which change less than half of the digits."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return type(found) is type(expected)
    if found.shape != expected.shape or not found.is_floating_point():
        return torch.equal(found, expected)
    largest = expected.where(expected.isfinite(), 0).abs().max().item() if expected.numel() else 0.0
    tolerance = math.sqrt(torch.finfo(found.dtype).eps) / 4 * largest
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
