"""Whether a run trains its weights: which of them no gradient reaches, and which no step moves."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..weights.shards import local
from .replicas import sum_of_sums

if TYPE_CHECKING:
    from .engine_state import EngineState

# Share of the largest gradient: adapters that begin at zero have less, and rounding swallows their first steps.
TINY = 1e-4
LEAST_STEPS = 10  # in the first ones, gates and adapters that start at zero keep the gradients of others zero
LEAST_RATE = 1e-3  # of the peak learning rate: below, an update may be smaller than what a weight can hold
LINES = {
    "without_gradient": "up to step {step} the gradient of {name} is zero in each record, so nothing trains it: look "
    "for detach(), .data, round() or a mask after it, or freeze it",
    "not_moved": "no step has moved {name}, up to step {step}: the optimizer leaves it out, its learning rate is 0, or "
    "its updates are smaller than what its type holds",
}


class Trained:
    """Looks at gradients in logged steps until each was once not zero: mostly in one. Not at the weights: weight decay
    moves them without a gradient. What moves shows in the bits of the weights at each record.

    Args:
        engine: of this process.
    """

    def __init__(self, engine: "EngineState"):
        self._engine, self._is_over = engine, False
        self._first: int | None = None  # the number of the first step that was looked at
        self._largest: dict[str, float] = {}  # {weight: largest element of its gradient, when one was first seen}
        self._flags: dict[Tensor, Tensor] = {}  # {weight: largest element of its gradient here, 0-dim}
        self._bits: Mapping[str, Tensor] = {}  # of each weight at the last record
        self._sum: Tensor | None = None  # of these
        self._first_record: tuple[int, Mapping[str, Tensor]] | None = None  # (steps taken, bits)
        self._since, self._is_compared, self._is_still = 0, False, False

    @cached_property
    def _waiting(self) -> dict[str, Tensor]:
        """{name: weight, or shard of it} of those here of which no process has seen a gradient."""
        return {name: weight for name, weight in self._engine.saved_tensors().items() if weight.requires_grad}

    def look(self, number: int) -> None:
        """Notes all gradients of step `number` that are still there. Does not wait for a GPU."""
        self._first = number if self._first is None else self._first
        for weight in self._waiting.values():
            self.note(weight)

    def note(self, weight: Tensor) -> None:
        """Notes whether the gradient of a weight is not zero."""
        gradient, flag = weight.grad, self._flags.get(weight)
        if gradient is not None and not (self._is_over or (flag is not None and flag.device.type == "cpu" and flag)):
            found = _largest(local(gradient))
            self._flags[weight] = found if flag is None else torch.maximum(flag, found)

    def has_moved(self, bits: Mapping[str, Tensor]) -> Tensor:
        """float64, 0-dim: 1 if a weight of this process has other bits than at the last record, or if this is the first
        one; else 0. Nothing is read from the device."""
        before, self._bits = self._sum, bits
        self._sum = sum_of_sums([*bits.values()], self._engine.accelerator.device)
        return torch.ones_like(self._sum).double() if before is None else (self._sum != before).double()

    def note_record(self, num_moved: float, step: int) -> None:
        """Prints a line, once, if the steps up to `step` moved no weight in any process, and should have."""
        since, self._since = self._since, step
        self._first_record = self._first_record or (step, self._bits)
        groups, accelerator = self._engine.optimizer.param_groups, self._engine.accelerator
        is_tiny = all(group["lr"] < LEAST_RATE * group.get("initial_lr", 0) or not group["lr"] for group in groups)
        if num_moved or self._is_still or is_tiny or accelerator.scaler is not None:  # which skips steps
            return
        self._is_still = True
        accelerator.print(
            f"no weight has moved since step {since}, at a learning rate of {float(groups[0]['lr']):g}: the optimizer "
            "updates other tensors than the model's, leaves its steps out, or makes updates too small for the weights"
        )

    def say(self, step: int) -> dict[str, list[str]]:
        """Prints a line for the weights whose gradient was zero whenever it was looked at, and one for those that have
        a gradient and that no step moves; each once, after enough steps. To be called at each record: a collective.
        Returns their names, for the run card."""
        found = {"without_gradient": self._unreached(step), "not_moved": self._unmoved(step)}
        for kind, names in found.items():
            if names:
                name = f"{names[0]}{', ...' * (len(names) > 1)}"
                self._engine.accelerator.print(LINES[kind].format(name=name, step=step))
        return {kind: names for kind, names in found.items() if names}

    def _unreached(self, step: int) -> list[str]:
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

    def _unmoved(self, step: int) -> list[str]:
        since, before = self._first_record or (step, self._bits)
        if self._is_compared or step - since < LEAST_STEPS or self._engine.accelerator.scaler is not None:
            return []
        self._is_compared = True
        found = gather_object([[name for name, bits in self._bits.items() if bool(bits != before.get(name))]])
        moved = {name for own in found for name in own}
        least = TINY * max(self._largest.values(), default=0.0)
        return [name for name, largest in self._largest.items() if name not in moved and largest > least]


def _largest(gradient: Tensor) -> Tensor:
    """The size of the largest element of a gradient, 0-dim, float32."""
    values = gradient._values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.numel():
        return torch.zeros((), device=values.device)
    least, most = torch.aminmax(values)  # a fourth of the time of any()
    return torch.maximum(-least, most).float()
