"""Finds weights that no gradient reaches, or no step moves, while a run goes on."""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..weights.shards import local
from .replicas import sum_of_bits

if TYPE_CHECKING:
    from .engine_state import EngineState

# Share of the largest gradient: adapters that begin at zero have less, and rounding swallows their first steps.
TINY = 1e-4
LEAST_STEPS = 10  # in the first ones, gates and adapters that start at zero keep the gradients of others zero


class Reached:
    """Looks at gradients in logged steps until each was once not zero: mostly in one. Not at the weights: weight decay
    moves them without a gradient.

    Args:
        engine: of this process.
    """

    def __init__(self, engine: "EngineState"):
        self._engine, self._is_over = engine, False
        self._first: int | None = None  # the number of the first step that was looked at
        self._largest: dict[str, float] = {}  # {weight: largest element of its gradient, when one was first seen}
        self._flags: dict[Tensor, Tensor] = {}  # {weight: largest element of its gradient here, 0-dim}
        self._bits: tuple[int, dict[str, int]] | None = None  # (step, {name: sum of the bits that are here})
        self._is_compared = False

    @cached_property
    def _waiting(self) -> dict[str, Tensor]:
        """{name: weight, or shard of it} of those here of which no process has seen a gradient."""
        return {name: weight for name, weight in self._engine.saved_tensors().items() if weight.requires_grad}

    def begin(self, number: int) -> None:
        """Step `number` is looked at."""
        self._first = number if self._first is None else self._first

    def look(self, number: int) -> None:
        """Notes all gradients of step `number`. Does not wait for a GPU."""
        self.begin(number)
        for weight in self._waiting.values():
            self.note(weight)

    def note(self, weight: Tensor) -> None:
        """Notes whether the gradient of a weight is not zero."""
        gradient, flag = weight.grad, self._flags.get(weight)
        if gradient is not None and not (self._is_over or (flag is not None and flag.device.type == "cpu" and flag)):
            found = _largest(local(gradient))
            self._flags[weight] = found if flag is None else torch.maximum(flag, found)

    def unreached(self, step: int) -> list[str]:
        """Names of the weights whose gradient was zero whenever it was looked at; once, after `step` steps that are
        enough. A collective, the same in all processes."""
        if self._is_over or self._first is None:
            return []
        seen = dict(zip(self._flags, torch.stack([*self._flags.values()]).tolist())) if self._flags else {}
        found = gather_object([{name: seen.get(weight, 0.0) for name, weight in self._waiting.items()}])
        for name, largest in ((name, largest) for own in found for name, largest in own.items() if largest):
            self._largest[name] = max(largest, self._largest.get(name, 0.0))
        names = [*dict.fromkeys(name for own in found for name in own if name not in self._largest)]
        self._waiting = {name: weight for name, weight in self._waiting.items() if name not in self._largest}
        is_enough, self._flags = step - self._first >= LEAST_STEPS, {}
        self._is_over = is_enough or not names
        return names if is_enough and self._largest else []

    def unmoved(self, step: int) -> list[str]:
        """Names of the weights that have a gradient and whose bits have not changed in LEAST_STEPS steps or more. To be
        asked at each record; it answers once. A collective, the same in all processes."""
        if self._is_compared or self._engine.accelerator.scaler is not None:  # which skips steps
            return []
        if self._bits is None:
            self._bits = step, self._sums_of_bits()
        since, before = self._bits
        if step - since < LEAST_STEPS:
            return []
        self._is_compared, now = True, self._sums_of_bits()
        found = gather_object([{name: bits != before.get(name) for name, bits in now.items()}])
        moved = {name for own in found for name in own if own[name]}
        least = TINY * max(self._largest.values(), default=0.0)
        return [name for name, largest in self._largest.items() if name not in moved and largest > least]

    def _sums_of_bits(self) -> dict[str, int]:
        trained = {name: weight for name, weight in self._engine.saved_tensors().items() if weight.requires_grad}
        # ZeRO-3 keeps this process's part of a weight beside it.
        parts = [local(getattr(weight, "ds_tensor", weight)).detach() for weight in trained.values()]
        return dict(zip(trained, torch.stack([sum_of_bits(part) for part in parts]).tolist() if parts else []))


def _largest(gradient: Tensor) -> Tensor:
    """The size of the largest element of a gradient, 0-dim, float32."""
    values = gradient._values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.numel():
        return torch.zeros((), device=values.device)
    least, most = torch.aminmax(values)  # a fourth of the time of any()
    return torch.maximum(-least, most).float()
