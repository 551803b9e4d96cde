"""The state of a run, except weights and optimizer state."""

import math
from dataclasses import dataclass

LOWER_IS_BETTER = ("loss", "perplexity", "error")  # in a metric's name


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better, by its name. The part from an @ on does not count."""
    return any(word in metric.partition("@")[0] for word in LOWER_IS_BETTER)


@dataclass
class TrainState:
    """The state of a run; saved in checkpoints, restored on resume."""

    step: int = 0  # optimizer steps taken
    num_skipped: int = 0  # steps that the loss scaler skipped; they do not advance the schedule
    evaluation_due: bool = False  # whether a stop request ended the evaluation after this step
    best: float | None = None  # the best value so far of `best_metric`
    best_metric: str | None = None  # `--metric_for_best_model`
    best_step: int | None = None  # steps taken before that evaluation; None in checkpoints of earlier versions
    num_not_better: int = 0  # evaluations since the best one

    def records_best(self, metric: str, value: float) -> bool:
        """Records the value of an evaluation; returns whether it is the best so far."""
        if metric != self.best_metric:  # the first evaluation, or the run was resumed with another metric
            self.forget_best()
        better = self.best is None or (value < self.best if lower_is_better(metric) else value > self.best)
        better = better and math.isfinite(value)
        self.best_metric, self.num_not_better = metric, self.num_not_better + 1
        if better:
            self.best, self.best_step, self.num_not_better = value, self.step, 0
        return better

    def forget_best(self) -> None:
        """The next evaluation counts as the best."""
        self.best, self.best_step, self.num_not_better = None, None, 0
