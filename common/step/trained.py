"""Finds weights that do not train: no gradient reaches them, or no step moves them."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..weights.shards import local
from .replicas import sum_of_sums

# Share of the largest gradient: adapters that start at zero have less, and rounding hides their first steps.
TINY = 1e-4
LEAST_STEPS = 10  # in the first ones, gates and adapters that start at zero keep the gradients of others zero
LEAST_RATE = 1e-3  # of the peak learning rate: below it, updates may be too small to change a weight
LINES = {
    "without_gradient": "up to step {step} the gradient of {name} is zero in each record, so nothing trains it: look "
    "for detach(), .data, round() or a mask after it, or freeze it",
    "not_moved": "no step up to {step} has changed {name}: the optimizer leaves it out, its learning rate is 0, or its "
    "updates are too small for its dtype",
}


class Trained:
    """Looks at gradients in logged steps, until a record compares the weights' bits with the first record's. Weights
    alone show too little: weight decay moves them without a gradient. `tensors`: `saved_tensors` of the engine."""

    def __init__(self, accelerator: Accelerator, optimizer: Any, tensors: Callable[[], dict[str, Tensor]]):
        self._accelerator, self._optimizer, self._tensors = accelerator, optimizer, tensors
        self._is_over, self._is_still, self._since = False, False, 0
        self._largest: dict[Tensor, Tensor] = {}  # {weight: largest element of its gradients here, 0-dim}
        self._bits: Mapping[str, Tensor] = {}  # of each weight at the last record
        self._sum: Tensor | None = None  # the sum of these bits
        self._first_record: tuple[int, Mapping[str, Tensor]] | None = None  # (steps taken, bits)

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """{name: weight, or shard of it} for the weights here that the optimizer has."""
        return {name: weight for name, weight in self._tensors().items() if weight.requires_grad}

    def look(self) -> None:
        """Records all gradients that exist. Does not wait for a GPU."""
        for weight in self._weights.values():
            self.note(weight)

    def note(self, weight: Tensor) -> None:
        if weight.grad is not None and not self._is_over:
            found = _largest(local(weight.grad))
            self._largest[weight] = torch.maximum(self._largest.get(weight, found), found)

    def has_moved(self, bits: Mapping[str, Tensor]) -> Tensor:
        """float64, 0-dim: 1 if a weight of this process has changed since the last record, or if this is the first
        record; otherwise 0. Nothing is read from the device."""
        before, self._bits = self._sum, bits
        self._sum = sum_of_sums([*bits.values()], self._accelerator.device)
        return torch.ones_like(self._sum).double() if before is None else (self._sum != before).double()

    def note_record(self, num_moved: float, step: int) -> None:
        """Prints a line, once, if the steps up to `step` moved no weight in any process, and should have."""
        since, self._since = self._since, step
        self._first_record = self._first_record or (step, self._bits)
        groups = self._optimizer.param_groups
        is_tiny = all(group["lr"] < LEAST_RATE * group.get("initial_lr", 0) or not group["lr"] for group in groups)
        if num_moved or step == since or self._is_still or is_tiny or self._accelerator.scaler is not None:
            return
        self._is_still = True
        self._accelerator.print(
            f"no weight has changed since step {since}, at a learning rate of {float(groups[0]['lr']):g}: the "
            "optimizer updates tensors that are not the model's, leaves its steps out, or its updates are too small"
        )

    def say(self, step: int) -> dict[str, list[str]]:
        """A collective at each record. Once, after enough steps, prints a line for weights whose gradient was always
        zero, and one for weights that no step has moved despite a gradient. Returns their names, for the run card."""
        since, before = self._first_record or (step, self._bits)
        if self._is_over or step - since < LEAST_STEPS:
            return {}
        self._is_over, scaler = True, self._accelerator.scaler
        largest = dict(zip(self._largest, torch.stack([*self._largest.values()]).tolist() if self._largest else []))
        # A scaler skips steps.
        moved = [name for name, bits in self._bits.items() if scaler is not None or bool(bits != before.get(name))]
        sizes, moves = dict[str, float](), set[str]()
        own = {name: largest.get(weight, 0.0) for name, weight in self._weights.items()}
        for others, of_process in gather_object([(own, moved)]):
            sizes |= {name: max(size, sizes.get(name, 0.0)) for name, size in others.items()}
            moves.update(of_process)
        least = TINY * max(sizes.values(), default=0.0)
        found = {
            "without_gradient": [name for name, size in sizes.items() if size == 0.0 < least],
            "not_moved": [name for name, size in sizes.items() if size > least and name not in moves],
        }
        for kind, names in found.items():
            if names:
                name = f"{names[0]}{', ...' * (len(names) > 1)}"
                self._accelerator.print(LINES[kind].format(name=name, step=step))
        return {kind: names for kind, names in found.items() if names}


def _largest(gradient: Tensor) -> Tensor:
    """The size of the largest element of a gradient, 0-dim, float32."""
    values = gradient._values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.numel():
        return torch.zeros((), device=values.device)
    least, most = torch.aminmax(values)  # takes a quarter of the time of any()
    return torch.maximum(-least, most).float()
