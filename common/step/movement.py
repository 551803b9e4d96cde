"""Whether the steps of a run move its weights at all."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..weights.shards import local

if TYPE_CHECKING:
    from .engine_state import EngineState

MOST = 64  # elements of each weight: an optimizer that moves none of them moves the others neither
LEAST = 1e-3  # of the peak learning rate: below, an update may be smaller than what a weight can hold


class Movement:
    """Compares some elements of each weight that the optimizer has with those of the last training record.

    Args:
        engine: of this process.
    """

    def __init__(self, engine: "EngineState"):
        self._engine, self._said = engine, False
        self._before: Tensor | None = None
        self._since = 0

    def moved(self) -> Tensor:
        """float64, 0-dim: 1 if a weight of this process has changed since the last call, or if this is the first; else
        0. Nothing is read from the device."""
        shards = [local(weight).detach().reshape(-1) for weight in self._engine._updated_tensors()]
        device = self._engine.accelerator.device
        picked = [shard[:: max(1, len(shard) // MOST)][:MOST] for shard in shards]
        real = [torch.view_as_real(each).view(-1) if each.is_complex() else each for each in picked]
        one = torch.ones(1, dtype=torch.float64, device=device)  # a process may have no weight
        before, self._before = self._before, torch.cat([one, *(each.to(device, torch.float64) for each in real)])
        if before is None or len(before) != len(self._before):  # the recipe added weights
            return one[0]
        return (before != self._before).any().double()

    def note(self, num_moved: float, step: int) -> None:
        """Prints a line, once, if the steps up to `step` moved no weight in any process, and should have."""
        since, self._since = self._since, step
        groups, scaler = self._engine.optimizer.param_groups, self._engine.accelerator.scaler
        is_tiny = all(group["lr"] < LEAST * group.get("initial_lr", 0) or not group["lr"] for group in groups)
        if num_moved or self._said or is_tiny or scaler is not None:  # which skips steps
            return
        self._said = True
        self._engine.accelerator.print(
            f"no weight has moved since step {since}, at a learning rate of {float(groups[0]['lr']):g}: the optimizer "
            "updates other tensors than the model's, leaves its steps out, or makes updates too small for the weights"
        )
