"""The mean of each metric over the evaluation set; a run records it and exports the best weights."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Subset

from common.checkpoint.export import export_model
from common.data.batches import Batch, ForwardStep, MapDataset, batches, resident
from common.errors import UsageError
from common.parallel.trainer import Trainer
from common.plan import Plan
from common.records.recorder import Recorder
from common.seeds import EVALUATION, seed_forward
from common.state import TrainState
from common.stopping.watch import Watch

Metrics = dict[str, float]


class Evaluation:
    """The evaluations of a run.

    Args:
        trainer: holds the model to evaluate.
        eval_set: map-style; each sample counts once.
        summarize: means over the set -> metrics to report.
        state: the run's state.
        watch: the run's watch; a stop request ends an evaluation early.

    Attributes:
        metrics: those of the last evaluation; empty before the first.

    Raises:
        UsageError: an evaluation of one sample does not return the metric `--metric_for_best_model`.
    """

    def __init__(
        self,
        trainer: Trainer,
        eval_set: MapDataset,
        summarize: Callable[[Metrics], Metrics],
        state: TrainState,
        watch: Watch,
    ):
        self.trainer, self.summarize, self.state = trainer, summarize, state
        num_workers, device = trainer.plan.config.num_workers, trainer.accelerator.device
        self.eval_set = eval_set if num_workers else resident(eval_set, device)  # moved once, not in each evaluation
        self.watch = watch
        self.metrics: Metrics = {}
        name = trainer.plan.config.metric_for_best_model
        if name is not None:
            one: Subset[Batch] = Subset(eval_set, [0])  # type: ignore[arg-type]  # torch's annotation is too narrow
            metrics = self._metrics(one, poll=lambda: False)
            assert metrics is not None
            if name not in metrics:
                raise UsageError(
                    f"--metric_for_best_model {name}: no such metric; type one of {', '.join(sorted(metrics))}"
                )

    def run(self, recorder: Recorder) -> None:
        """Evaluates, records the metrics, and exports the weights if they are the best so far.

        A stop request ends the evaluation early: nothing is recorded, and a resumed run evaluates first.
        """
        trainer, state, config = self.trainer, self.state, self.trainer.plan.config
        state.evaluation_due = True
        with recorder.paused(), trainer.ema_weights():
            metrics = self._metrics(self.eval_set, self.watch.poll)
            self.watch.settle()
            if metrics is None:
                return
            state.evaluation_due = False
            name = config.metric_for_best_model
            if name is not None and state.is_best(name, metrics[name]):
                export_model(trainer, config.output_dir / "best")
        recorder.evaluation(metrics)
        self.metrics = metrics

    def _metrics(self, eval_set: MapDataset, poll: Callable[[], bool]) -> Metrics | None:
        trainer = self.trainer
        means = evaluate(trainer.accelerator, trainer.model, trainer.forward_step, eval_set, trainer.plan, poll)
        if means is None:
            return None
        return {name: _number(name, value) for name, value in self.summarize(means).items()}


def _number(name: str, value: Any) -> float:
    """Converts a value from `summarize` to float. Raises UsageError if the value is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f'summarize returned "{name}" as {type(value).__name__}: expected a number') from None


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    forward_step: ForwardStep,
    eval_set: MapDataset,
    plan: Plan,
    poll: Callable[[], bool] = lambda: False,
) -> Metrics | None:
    """Mean of each metric over the evaluation set, each sample counted exactly once.

    Every process runs the same number of forward passes, because the processes of a sharded model wait
    for each other. The last passes are padded with samples that are not counted.

    Args:
        accelerator: from `start(config)`.
        model: the model from `prepare`.
        forward_step: as for `fit`.
        eval_set: map-style dataset of dicts of tensors.
        plan: the run's plan.
        poll: called before each forward pass. It must return the same in all processes; True ends the evaluation.

    Returns:
        {metric: mean}, the same in every process; None if `poll` ended the evaluation.
    """
    size, num_samples = plan.micro_batch_size, len(eval_set)
    num_passes = -(-num_samples // (size * plan.data_parallel_size))
    # Ids past the end are padding.
    starts = [plan.row(index) * size for index in range(num_passes)]
    samples = ((EVALUATION, torch.arange(start, start + size).clamp_(max=num_samples - 1)) for start in starts)
    sums: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    _set_training(model, False)
    for index, batch in enumerate(batches(eval_set, samples, accelerator.device, plan.config)):
        if poll():
            _set_training(model, True)
            return None
        num_real = min(max(num_samples - starts[index], 0), size)
        seed_forward(plan.config.seed, EVALUATION, plan.row(index), accelerator.device)
        values = forward_step(model, batch)
        weight = batch.get("weight", torch.ones(size, device=accelerator.device))[:num_real].double()
        total += weight.sum()
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + (value[:num_real].double() * weight).sum()
    _set_training(model, True)
    *means, total = accelerator.reduce(torch.stack([*sums.values(), total]), "sum").tolist()
    return {name: mean / total for name, mean in zip(sums, means)}


def _set_training(model: nn.Module, training: bool) -> None:
    model.train(training)
    model.training = training  # a wrapper may forward train() without setting its own flag
