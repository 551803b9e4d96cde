"""Finds weights that no gradient reaches, while a run goes on."""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..weights.shards import local

if TYPE_CHECKING:
    from .engine_state import EngineState

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
        self._has_seen = False  # a gradient, in any process
        self._flags: dict[Tensor, Tensor] = {}  # {weight: whether it had a gradient here, 0-dim}

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
            found = _has_values(local(gradient))
            self._flags[weight] = found if flag is None else flag | found

    def unreached(self, step: int) -> list[str]:
        """Names of the weights whose gradient was zero whenever it was looked at; once, after `step` steps that are
        enough. A collective, the same in all processes."""
        if self._is_over or self._first is None:
            return []
        seen = dict(zip(self._flags, torch.stack([*self._flags.values()]).tolist())) if self._flags else {}
        found = gather_object([{name: seen.get(weight, False) for name, weight in self._waiting.items()}])
        reached = {name for own in found for name in own if own[name]}
        names = [*dict.fromkeys(name for own in found for name in own if name not in reached)]
        self._waiting = {name: weight for name, weight in self._waiting.items() if name not in reached}
        self._flags, self._has_seen = {}, self._has_seen or bool(reached)
        is_enough = step - self._first >= LEAST_STEPS
        self._is_over = is_enough or not names
        return names if is_enough and self._has_seen else []


def _has_values(gradient: Tensor) -> Tensor:
    """Whether a gradient has another value than zero, 0-dim."""
    values = gradient._values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    least, most = torch.aminmax(values)  # a fourth of the time of any()
    return (least != 0) | (most != 0)
