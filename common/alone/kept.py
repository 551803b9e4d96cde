"""What the user's objects hold, kept by value while one process trains with them, and given back."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from .walk import LARGE, Walk


class NotChecked(Exception):
    """The check is not possible; the message says why."""


@dataclass
class Changes:
    """What the `with` block of `kept` changed beside weights, buffers and the optimizer.

    Attributes:
        names: of variables, attributes and tensors that the recipe's functions refer to, and of numbers of layers.
        generators: of random numbers that these functions draw from, beside the global ones.
        lost: of iterators that moved on, and of large tensors: they cannot be set back.
        sharing: {name of a tensor: (its name, the name of another tensor with the same data)}.
    """

    names: list[str] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    sharing: dict[str, tuple[str, str]] = field(default_factory=dict)


@contextmanager
def kept(
    model: nn.Module, optimizer: torch.optim.Optimizer, functions: Iterable[Any], device: torch.device
) -> Iterator[Changes]:
    """Lets the `with` block train with these very objects, on the device, and gives them back what they held.

    The block works with copies of the tensors' data; those that share memory go on sharing it. Afterwards weights,
    buffers, gradients, optimizer state, flags, attributes, hooks, closures, globals of the recipe and generators are
    what they were. Raises NotChecked if a weight cannot be copied, or an object cannot be read.

    Args:
        model: whole, on the CPU.
        optimizer: over its weights.
        functions: of the recipe.
        device: to train on.
    """
    walk, changes = Walk(), Changes()
    moving = {id(each) for each in (*model.parameters(), *model.buffers())}
    try:  # all copies first: if one fails, nothing has changed
        of_model = walk.visit(model)
        of_training = walk.visit(optimizer)
        moving |= {id(tensor) for _, tensor in walk.tensors[of_model[1] :] if tensor.ndim > 0}  # not counts of steps
        for function in functions:
            walk.visit(function)
        changes.sharing = _sharing(walk.tensors)
        lent = _copies(walk.tensors, of_training[1], moving, device)
    except Exception as error:  # too little memory, a tensor without a storage, or any object of any package
        raise NotChecked(f"model and optimizer cannot be copied: {first_line(error)}") from None
    for each in lent:
        each.lend()
    try:
        yield changes
    finally:
        numbers = [name for entry in walk.entries[: of_model[0]] for name in entry.find_changes(numbers=True)]
        found = {True: list[str](), False: list[str]()}
        for entry in walk.entries[of_training[0] :]:
            found[entry.is_generator] += entry.find_changes()
        written = [each for each in lent if not each.is_trained and each.is_written()]
        changes.names += [*found[False], *(each.name for each in written), *numbers]
        changes.generators += found[True]
        changes.lost += [name for name, moved in walk.iterators if moved()]
        changes.lost += [each.name for each in written if each.copied is None]
        for tensor in lent:
            tensor.give_back()
        for entry in walk.entries:
            entry.give_back()


@dataclass
class _Lent:
    """A tensor that works with a copy of its data."""

    name: str
    tensor: Tensor
    is_trained: bool
    copied: Tensor | None  # None: it works with its own data
    data: Tensor
    gradient: Tensor | None
    wants_gradient: bool
    version: int = 0

    def lend(self) -> None:
        if self.copied is not None:
            self.tensor.data = self.copied
        self.version = self.tensor._version

    def is_written(self) -> bool:
        return self.tensor._version != self.version

    def give_back(self) -> None:
        self.tensor.data = self.data
        if self.tensor.is_leaf:
            self.tensor.grad = self.gradient
            self.tensor.requires_grad_(self.wants_gradient)


def _copies(tensors: list[tuple[str, Tensor]], trained: int, moving: set[int], device: torch.device) -> list[_Lent]:
    """Copies of these tensors' data, and those with these ids on the device. Beside the first `trained` ones it copies
    `LARGE` bytes."""
    storages: dict[int, torch.UntypedStorage] = {}
    lent: list[_Lent] = []
    room = LARGE
    for number, (name, tensor) in enumerate(tensors):
        is_trained, copied = number < trained, None
        if tensor.is_inference():  # nothing can write it
            continue
        room -= 0 if is_trained or tensor.layout is not torch.strided else tensor.nbytes
        if is_trained or (tensor.layout is torch.strided and room >= 0):
            copied = _copied(tensor, device if id(tensor) in moving else tensor.device, storages)
        gradient = tensor.grad if tensor.is_leaf else None
        lent.append(_Lent(name, tensor, is_trained, copied, tensor.data, gradient, tensor.requires_grad))
    return lent


def _copied(tensor: Tensor, device: torch.device, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone() if device == tensor.device else storage.to(device=device)
    empty = torch.empty(0, dtype=tensor.dtype, device=storages[storage._cdata].device)
    return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


def _sharing(tensors: list[tuple[str, Tensor]]) -> dict[str, tuple[str, str]]:
    first: dict[int, str] = {}
    pairs: dict[str, tuple[str, str]] = {}
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            other = first.setdefault(tensor.data_ptr(), name)
            if other != name:
                pairs[name] = pairs[other] = (other, name)
    return pairs
