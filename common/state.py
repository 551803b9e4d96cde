"""The state of a run, except weights and optimizer state."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

PER_PROCESS = ("losses", "weights", "metrics")  # fields that differ between processes
LOWER_IS_BETTER = ("loss", "perplexity", "error")  # in a metric's name; for other metrics higher is better


@dataclass
class TrainState:
    """The state of a run; saved in checkpoints, restored on resume.

    Attributes:
        step: optimizer steps taken.
        num_skipped: steps that the loss scaler skipped; they do not advance the schedule.
        evaluation_due: whether a stop request ended the evaluation after this step.
        best: the best value so far of `best_metric`.
        best_metric: `--metric_for_best_model`.
        num_not_better: evaluations since the best one.
        num_steps: steps since the last training record.
        seconds: training time of these steps.
        losses: for each micro-batch of this process in these steps, the sum of weight × loss, 0-dim.
        weights: for each of these steps, the sum of the weights of this process's samples.
        metrics: for each of these micro-batches, the other metrics times the weights; sums after a resume.
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
    metrics: list[dict[str, Tensor]] = field(default_factory=list)

    def is_best(self, metric: str, value: float) -> bool:
        """Records the value of an evaluation; returns whether it is the best so far."""
        if metric != self.best_metric:  # the first evaluation, or the run was resumed with another metric
            self.best, self.best_metric, self.num_not_better = None, metric, 0
        lower_is_better = any(word in metric for word in LOWER_IS_BETTER)
        better = self.best is None or (value < self.best if lower_is_better else value > self.best)
        better = better and math.isfinite(value)
        self.best, self.num_not_better = (value, 0) if better else (self.best, self.num_not_better + 1)
        return better

    def metric_sums(self) -> dict[str, Tensor]:
        """{metric: its sum over this process's samples since the last record, 0-dim float64}."""
        names = dict.fromkeys(name for values in self.metrics for name in values)
        found = {name: [values[name].double().sum() for values in self.metrics if name in values] for name in names}
        return {name: torch.stack(sums).sum() for name, sums in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """The fields that are the same in all processes, for JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in PER_PROCESS}
