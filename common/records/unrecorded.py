"""The sums over the optimizer steps that no training record holds yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..parallel.engine import StepResult


@dataclass
class Unrecorded:
    """What happened in this process since the last training record. Checkpoints hold it.

    Attributes:
        num_taken: optimizer steps.
        seconds: their training time.
        losses: for each micro-batch, the sum of weight × loss, 0-dim.
        weights: for each step, the sum of the weights of the samples.
        metrics: for each micro-batch, the other metrics times the weights; sums after a resume.
    """

    num_taken: int = 0
    seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor | float] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Adds an optimizer step, without its time."""
        self.num_taken += 1
        self.losses += result.losses
        self.weights.append(result.weight)
        self.metrics += result.metrics

    def metric_sums(self) -> dict[str, Tensor]:
        """{metric: its sum over this process's samples, 0-dim float64}."""
        names = dict.fromkeys(name for values in self.metrics for name in values)
        totals = {name: [values[name].double().sum() for values in self.metrics if name in values] for name in names}
        return {name: torch.stack(sums).sum() for name, sums in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """What is the same in all processes, for JSON. The keys are those of checkpoints."""
        return {"num_steps": self.num_taken, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self.num_taken, self.seconds = state["num_steps"], state["seconds"]
