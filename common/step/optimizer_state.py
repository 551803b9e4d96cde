"""The state of an optimizer: tensors, numbers in its parameter groups and state, and its own attributes."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import UsageError
from ..weights.shards import TensorReader, read_like

OF_THE_RUN = ("params", "lr", "initial_lr", "split_from")  # the command line or the layout decides these
NUMBERS = ("bool", "int", "float")
# Attributes of every optimizer, and one that torch changes in the first fused step.
OF_TORCH = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "_need_device_dtype_check_for_fused"}


class Numbers:
    """Saves and restores the numbers of the user's optimizer, and finds what a checkpoint would lose."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups = [_numbers_of(group) for group in optimizer.param_groups]
        self._not_stored = self._versions()

    def state_dict(self) -> dict[str, Any]:
        """For JSON: the numbers of each parameter group that changed in this run, and {slot: type} of numbers in the
        state, whose values `as_tensor` turns into tensors."""
        groups = [
            {name: value for name, value in _numbers_of(group).items() if name not in before or value != before[name]}
            for group, before in zip(self.optimizer.param_groups, self._groups)
        ]
        # Numbers of DeepSpeed's own optimizers are tensors in torch's.
        states = () if type(self.optimizer).__module__.startswith("deepspeed") else self.optimizer.state.values()
        slots = [(slot, type(value).__name__) for state in states for slot, value in state.items()]
        return {"groups": groups, "numbers": {slot: kind for slot, kind in slots if kind in NUMBERS}}

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`, after the tensors."""
        groups = content["groups"]
        for index, group in enumerate(self.optimizer.param_groups):
            at = group.get("split_from", index)
            for name, value in groups[at].items() if at < len(groups) else ():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        for state in self.optimizer.state.values():
            for slot, kind in content["numbers"].items():
                if isinstance(held := state.get(slot), Tensor) and not held.ndim:  # it may be a number of some weights
                    state[slot] = int(held) if kind == "int" and float(held).is_integer() else held.item()

    def check_complete(self) -> None:
        """Raises UsageError for anything of the optimizer that has changed and that a checkpoint does not hold."""
        for what, version in self._versions().items():
            if self._not_stored.get(what, [None]) != version:
                raise UsageError(
                    f"{type(self.optimizer).__name__} changes its {what}, which a checkpoint does not store: keep it "
                    "in the state of a weight, or as numbers in param_groups, or remove --save_every; instead of a "
                    "learning-rate scheduler, use --lr_schedule or schedule= of fit"
                )

    def _versions(self) -> dict[str, Any]:
        """{what: version} of attributes and of values of parameter groups that are no numbers; and state that is not a
        weight's, or whose name has a dot, with versions that are always new. An object has no version."""
        values = {f"attribute {name}": value for name, value in vars(self.optimizer).items() if name not in OF_TORCH}
        weights: set[Any] = set()
        for number, group in enumerate(self.optimizer.param_groups):
            weights |= {*group["params"]}
            for name in group.keys() - _numbers_of(group).keys() - {*OF_THE_RUN}:
                values[f"param_groups[{number}][{name!r}]"] = group[name]
        keys, states = self.optimizer.state.keys(), self.optimizer.state.values()
        others = [f"state[{key!r:.40}]" for key in keys - weights if weights]  # ZeRO-3 takes them out
        others += [f"slot {slot!r}" for state in states for slot in state if "." in str(slot)]
        versions: dict[str, Any] = {what: object() for what in others}
        for what, value in values.items():
            parts = [(id(part), part._version) if isinstance(part, Tensor) else part for part in tree_leaves(value)]
            versions[what] = [part if isinstance(part, bool | int | float | str | tuple) else None for part in parts]
        return versions


def as_tensor(optimizer: torch.optim.Optimizer, slot: str, value: Any) -> Tensor:
    """A number of an optimizer's state as a 0-dim tensor, or a tensor. Raises UsageError for anything else."""
    if isinstance(value, Tensor):
        return value
    if type(value).__name__ not in NUMBERS:
        raise UsageError(
            f"{type(optimizer).__name__} keeps {slot}, which is neither a tensor nor a number and cannot be saved in "
            "a checkpoint: remove --save_every, or use AdamW or SGD"
        )
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter group that JSON holds: numbers, texts, and tuples and lists of them."""
    flat = {name: value if isinstance(value, tuple | list) else [value] for name, value in group.items()}
    kinds = (bool, int, float, str, type(None))
    are_numbers = {name for name, values in flat.items() if all(isinstance(value, kinds) for value in values)}
    return {name: copy(group[name]) for name in group if name in are_numbers and name not in OF_THE_RUN}


def load_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], reader: TensorReader) -> None:
    """Restores the tensors of an optimizer's state; each is placed like its weight."""
    slots, on_device = optimizer_slots(reader), counts_on_device(optimizer)
    for name, weight in weights.items():
        for slot in slots.get(name, []):
            key = f"optimizer.{name}.{slot}"
            shape = list(reader.tensors[key]["shape"])
            if optimizer.defaults.get("fused") and shape not in ([], list(weight.shape)):  # its kernel does not check
                raise UsageError(f"{key} of the checkpoint has the shape {shape}, the weight {list(weight.shape)}")
            kept = reader.tensor(key) if slot == "step" and not on_device else read_like(weight, reader, key)
            optimizer.state[weight][slot] = kept


def optimizer_slots(reader: TensorReader) -> dict[str, list[str]]:
    """{weight name: slots of its optimizer state} in a checkpoint."""
    slots: dict[str, list[str]] = {}
    for key in reader.tensors:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            slots.setdefault(name, []).append(slot)
    return slots


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps its step count on the device, as torch's fused and capturable optimizers do."""
    return any(optimizer.defaults.get(kind) for kind in ("fused", "capturable"))
