"""Copies of a model and an optimizer, so that the steps of one process alone change neither."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line

HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]  # the names of torch's dicts


class NotChecked(Exception):
    """The check is not possible; the message says why."""


@contextmanager
def borrowed(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Gives model and optimizer copies of their tensors on the device for the `with` block, and their own ones back.

    The objects stay the same: what a closure or an optimizer refers to is what trains. They have the hooks and counters
    of before afterwards: those that a first pass makes would be in one process alone. Raises NotChecked if a tensor
    cannot be copied.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # tensors that share one go on sharing its copy
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone() if device.type == "cpu" else storage.to(device=device)
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())

    weights = [(weight, weight.data, weight.grad) for weight in model.parameters()]
    layers = [(layer, dict(layer._buffers), _plain(layer), _hooks(layer)) for layer in model.modules()]
    try:  # all copies first: if one fails, nothing has changed
        copies = [copied(data) for _, data, _ in weights]
        moved = {id(buffer): copied(buffer) for buffer in model.buffers()}
    except RuntimeError as error:  # such as too little memory, or a kind of tensor without a storage
        raise NotChecked(f"its weights cannot be copied: {first_line(error)}") from None
    try:
        for (weight, _, _), data in zip(weights, copies):
            weight.data = data
        for layer, buffers, *_ in layers:
            layer._buffers.update({name: moved[id(buffer)] for name, buffer in buffers.items() if buffer is not None})
        with kept_optimizer(model, optimizer):
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.ndim > 0})
            yield
    finally:
        for weight, data, gradient in weights:
            weight.data, weight.grad = data, gradient
        for layer, *before in layers:
            _give_back(layer, *before)


@contextmanager
def kept_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives an optimizer a copy of its state for the `with` block, over the same weights, and its own one back."""
    attributes = dict(vars(optimizer))
    pinned = {id(kept): kept for kept in (model, optimizer, *model.modules(), *model.parameters())}
    vars(optimizer).update(copy.deepcopy(attributes, pinned))
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)


def twins(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Copies of model and optimizer; the optimizer's holds the copied weights. Raises NotChecked if one has none."""
    memo: dict[int, Any] = {}
    twin = object.__new__(type(optimizer))  # not deepcopy: torch's optimizers leave out the attributes of subclasses
    memo[id(optimizer)] = twin
    try:
        copied = copy.deepcopy(model, memo)
        vars(twin).update(copy.deepcopy(vars(optimizer), memo))
    except Exception as error:
        raise NotChecked(f"they cannot be copied: {first_line(error)}") from None
    vars(twin).pop("step", None)  # a scheduler's: it would step the original
    return copied, twin


def _plain(layer: nn.Module) -> dict[str, Any]:
    """The numbers and words among the attributes of a layer, such as a counter."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, bool | int | float | str)}


def _hooks(layer: nn.Module) -> dict[str, Any]:
    """{name of a dict of hooks of a layer: a copy of it}"""
    return {name: copy.copy(vars(layer)[name]) for name in HOOKS if name in vars(layer)}


def _give_back(layer: nn.Module, buffers: dict[str, Any], plain: dict[str, Any], hooks: dict[str, Any]) -> None:
    layer._buffers.update(buffers)
    for name in _plain(layer).keys() - plain.keys():
        del vars(layer)[name]
    vars(layer).update(plain)
    for name, own in hooks.items():  # in place: the handle that removes a hook refers to its dict
        vars(layer)[name].clear()
        vars(layer)[name].update(own)
