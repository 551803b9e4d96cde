"""The state of a run at a step, apart from weights and optimizer state."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

LOWER_IS_BETTER = ("loss", "perplexity", "error")  # what names such metrics; of others more is better


@dataclass
class TrainState:
    """Saved in checkpoints, restored on resume.

    Attributes:
        step: optimizer steps taken.
        num_skipped: steps that the loss scaler skipped; they do not advance the schedule.
        evaluation_due: a signal came before or during the evaluation after this step.
        best: the best value so far of `best_metric`, which is `--metric_for_best_model`.
        num_not_better: evaluations since then.
        num_steps: steps since the last training record.
        seconds: the time these steps took.
        losses: sums of weight × loss of this process's micro-batches since the last record, 0-dim.
        weights: the sums of the weights of these micro-batches.
    """

    step: int = 0
    num_skipped: int = 0
    evaluation_due: bool = False
    best: float | None = None
    best_metric: str | None = None
    num_not_better: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor | float] = field(default_factory=list)

    def is_best(self, metric: str, value: float) -> bool:
        """Takes in what an evaluation gave; whether it is better than all before it."""
        if metric != self.best_metric:  # the run was resumed with another
            self.best, self.best_metric, self.num_not_better = None, metric, 0
        lower_is_better = any(word in metric for word in LOWER_IS_BETTER)
        better = self.best is None or (value < self.best if lower_is_better else value > self.best)
        better = better and math.isfinite(value)
        self.best, self.num_not_better = (value, 0) if better else (self.best, self.num_not_better + 1)
        return better

    def state_dict(self) -> dict[str, Any]:
        """What is the same in all processes, as JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("losses", "weights")}
