"""The state of an optimizer: tensors, numbers in its parameter groups and state, and its own attributes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..weights.shards import TensorReader, read_like

OF_THE_RUN = ("params", "lr", "initial_lr", "split_from")  # the command line or the layout decides these
NUMBERS = {"bool": bool, "int": int, "float": float}
# Attributes of every optimizer, and one that torch changes in the first fused step.
OF_TORCH = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "_need_device_dtype_check_for_fused"}


class Numbers:
    """Saves and restores the numbers of the user's optimizer, and finds what a checkpoint would lose."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups = [_numbers_of(group) for group in optimizer.param_groups]
        self._attributes = {name: _version(value) for name, value in vars(optimizer).items()}

    def state_dict(self) -> dict[str, Any]:
        """For JSON: the numbers of each parameter group that changed in this run, and {slot: type} of numbers in the
        state, whose values `as_tensor` turns into tensors."""
        groups = []
        for group, before in zip(self.optimizer.param_groups, self._groups):
            now = _numbers_of(group)
            groups.append({name: value for name, value in now.items() if name not in before or value != before[name]})
        # Numbers of DeepSpeed's own optimizers are tensors in torch's.
        states = () if type(self.optimizer).__module__.startswith("deepspeed") else self.optimizer.state.values()
        slots = {slot: value for state in states for slot, value in state.items()}
        kinds = {slot: type(value).__name__ for slot, value in slots.items() if type(value).__name__ in NUMBERS}
        return {"groups": groups, "numbers": kinds}

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`, after the tensors."""
        groups = content["groups"]
        for index, group in enumerate(self.optimizer.param_groups):
            at = group.get("split_from", index)
            group.update(groups[at] if at < len(groups) else {})
        for state in self.optimizer.state.values():
            for slot, kind in content["numbers"].items():
                if isinstance(state.get(slot), Tensor):
                    state[slot] = NUMBERS[kind](state[slot].item())

    def check_complete(self) -> None:
        """Raises UsageError for an attribute of the optimizer that has changed: a checkpoint does not hold it."""
        for name, value in vars(self.optimizer).items():
            if name not in OF_TORCH and self._attributes.get(name) != _version(value):
                kind = type(self.optimizer).__name__
                raise UsageError(
                    f"{kind} changes its attribute {name}, which a checkpoint does not store: keep it in state or in "
                    "param_groups, or remove --save_every"
                )


def as_tensor(optimizer: str, slot: str, value: Any) -> Tensor:
    """A number of an optimizer's state as a 0-dim tensor. Raises UsageError for anything else."""
    if type(value).__name__ not in NUMBERS:
        raise UsageError(
            f"{optimizer} keeps {slot}, which is neither a tensor nor a number and cannot be saved in a checkpoint: "
            "remove --save_every, or use AdamW or SGD"
        )
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (*NUMBERS.values(), str, type(None))
    return {name: value for name, value in group.items() if name not in OF_THE_RUN and isinstance(value, kinds)}


def _version(value: Any) -> Any:
    """A key that changes when the value changes; for objects of other kinds it never does."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return {str(name): _version(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_version(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None


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
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, slot = rest.rpartition(".")
            slots.setdefault(name, []).append(slot)
    return slots


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps its step count on the device, as torch's fused and capturable optimizers do."""
    return any(optimizer.defaults.get(kind) for kind in ("fused", "capturable"))
