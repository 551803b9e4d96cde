"""The story of a training run, told once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Subset

from common.checkpoint import Saver, export_model, find_checkpoint, identity
from common.checks import check_same_start
from common.config import RunConfig
from common.data import Batch, ForwardStep, MapDataset, batches, check_dataset
from common.errors import UsageError
from common.group import CpuGroup
from common.output_dir import OutputDir, is_done
from common.plan import Plan
from common.profile import profile
from common.random_state import random_state_kept
from common.record import Recorder
from common.schedule import learning_rate_factor
from common.start import data_shares
from common.state import TrainState
from common.step import Trainer, prepare
from common.watch import Watch

Metrics = dict[str, float]


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_step: ForwardStep,
    train_set: MapDataset,
    eval_set: MapDataset,
    config: RunConfig,
    summarize: Callable[[Metrics], Metrics] = dict,
    tokens_per_sample: int | None = None,
    flops_per_sample: float | None = None,
) -> Metrics:
    """Trains, evaluates, records, and exports the model to `<output_dir>/model/`.

    Args:
        accelerator: from `start(config)`.
        model: any module, on the CPU, the same in every process.
        optimizer: over the model's parameters; its learning rates are the peaks of the schedule.
        forward_step: (model, batch) -> metrics, each of shape (batch,), one value per example;
            "loss" is the one that is trained on. A batch with a "weight" of shape (batch,), such
            as a number of tokens, weights the mean of them all.
        train_set: map-style dataset of dicts of tensors.
        eval_set: the same; every sample of it is counted exactly once.
        config: the knobs.
        summarize: means over the evaluation set -> what is reported.
        tokens_per_sample: where samples are sequences; records then have `tokens_per_second`, too.
        flops_per_sample: floating-point operations of forward and backward pass; records then have
            `mfu`, the share of what the GPUs could do, where it is known of them.

    Returns:
        The last evaluation; nothing where a resumed run was finished already.

    Raises:
        UsageError: sizes that do not fit together, or an output_dir that cannot be used.
        NonFiniteError: a loss or gradient norm that is not finite; nothing is exported.
    """
    check_dataset(train_set)
    check_dataset(eval_set)
    plan = Plan.of(config, len(train_set), *data_shares(accelerator, config))
    group, this_run = CpuGroup(config.hang_timeout), identity(plan, optimizer)
    with OutputDir(plan, group), Watch(accelerator, plan, group) as watch:
        checkpoint = find_checkpoint(plan, this_run, model, optimizer, group)
        state = checkpoint.state if checkpoint else TrainState()
        if config.resume_from_checkpoint and group.broadcast(is_done(plan, state)):
            accelerator.print(f"nothing to do: {config.output_dir} is done; --overwrite_output_dir starts over")
            return {}
        if checkpoint:
            checkpoint.load_weights(model)
        check_same_start(model, (train_set, eval_set), group)
        trainer = prepare(accelerator, model, optimizer, forward_step, plan)
        stream = batches(train_set, plan.micro_batches(state.step), accelerator.device, config.num_workers)
        set_seed(config.seed + plan.share)  # from here on other samples have another dropout
        if checkpoint:
            checkpoint.load_rest(trainer, state, group)
        check_metric(trainer, eval_set, summarize)
        metrics: Metrics = {}
        with (
            # First, as it may refuse, and the recorder clears what an earlier run left behind.
            profile(accelerator, plan, plan.num_steps - state.step) as step_profiler,
            Recorder(accelerator, plan, state, tokens_per_sample, flops_per_sample) as recorder,
            Saver(trainer, this_run, group) as saver,
        ):
            if checkpoint and state.evaluation_due:
                metrics = evaluation(trainer, eval_set, summarize, state, recorder, watch)
                if watch.stops:
                    watch.stop(checkpoint.path)
            trainer.model.train()
            while not plan.is_over(state):
                step = state.step
                # A step that the loss scaler skips does not advance the schedule.
                position = step - state.num_skipped
                factor = learning_rate_factor(config.lr_schedule, position, plan.num_steps, config.warmup_steps)
                learning_rate = trainer.set_learning_rate(factor)
                micro_batches = [next(stream) for _ in range(plan.accumulation)]
                watch.progress()
                result = trainer.step(micro_batches, wants_norm=plan.reads(step) or watch.stops)
                recorder.add(learning_rate, result)
                watch.step(step, result)
                step_profiler()
                if plan.logs(step):
                    recorder.training(step)
                if plan.evaluates(step):
                    metrics = evaluation(trainer, eval_set, summarize, state, recorder, watch)
                # Never after a step of whose gradient nothing is known: the next one asks for its norm.
                stops = watch.stops and result.grad_norm is not None
                if stops or plan.saves(step) or (config.save_every and plan.is_over(state)):
                    with recorder.paused():
                        saver.save(state)
                        watch.progress()
                if stops:
                    watch.stop(saver.finish())
            with trainer.averaged_weights():
                export_model(trainer, Path(config.output_dir) / "model")
    return metrics


def evaluation(
    trainer: Trainer,
    eval_set: MapDataset,
    summarize: Callable[[Metrics], Metrics],
    state: TrainState,
    recorder: Recorder,
    watch: Watch,
) -> Metrics:
    """Evaluates and records it, and keeps the weights if they are the best so far. It remains due where a
    signal ends it; nothing is recorded then, and nothing returned."""
    state.evaluation_due = True
    with recorder.paused(), trainer.averaged_weights():
        means = evaluate(trainer.accelerator, trainer.model, trainer.forward_step, eval_set, trainer.plan, watch.pulse)
        watch.settle()
        if means is None:
            return {}
        metrics = {name: number(name, value) for name, value in summarize(means).items()}
        state.evaluation_due = False
        config = trainer.plan.config
        name = config.metric_for_best_model
        if name is not None and state.is_best(name, metrics[name]):
            export_model(trainer, Path(config.output_dir) / "best")
    recorder.evaluation(state.step - 1, metrics)
    return metrics


def check_metric(trainer: Trainer, eval_set: MapDataset, summarize: Callable[[Metrics], Metrics]) -> None:
    """Raises UsageError if an evaluation, tried with one sample, lacks `--metric_for_best_model`."""
    name, plan = trainer.plan.config.metric_for_best_model, trainer.plan
    if name is None:
        return
    one: Subset[Batch] = Subset(eval_set, [0])  # type: ignore[arg-type]  # torch means any map-style set
    means = evaluate(trainer.accelerator, trainer.model, trainer.forward_step, one, plan)
    assert means is not None  # nothing stops it
    metrics = {name: number(name, value) for name, value in summarize(means).items()}
    if name not in metrics:
        raise UsageError(f"--metric_for_best_model {name}: no such metric; type one of {', '.join(sorted(metrics))}")


def number(name: str, value: Any) -> float:
    """What `summarize` gave. Raises UsageError if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f'summarize gives "{name}" as {type(value).__name__}: expected a number') from None


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    forward_step: ForwardStep,
    eval_set: MapDataset,
    plan: Plan,
    stops: Callable[[], bool] = lambda: False,
) -> Metrics | None:
    """Mean of each metric over the evaluation set, each sample counted exactly once.

    Every process runs the same number of forward passes, because sharded models wait for each
    other; the last ones are padded with samples that are not counted.

    Args:
        accelerator: from `start(config)`.
        model: as `prepare` made it.
        forward_step: as for `fit`.
        eval_set: map-style dataset of dicts of tensors.
        plan: of the run.
        stops: asked before each pass, in all processes with the same answer, whether to give up.

    Returns:
        {metric: mean}, the same in every process; None where it gave up.
    """
    size, num_samples = plan.micro_batch_size, len(eval_set)
    num_passes = -(-num_samples // (size * plan.num_shares))
    # Pass i of process p holds samples (i * num_shares + p) * size and up; those past the end are padding.
    starts = [(index * plan.num_shares + plan.share) * size for index in range(num_passes)]
    sample_ids = (torch.arange(start, start + size).clamp_(max=num_samples - 1) for start in starts)
    sums: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    _set_training(model, False)
    with random_state_kept():  # training goes on as if there had been no evaluation
        for start, batch in zip(starts, batches(eval_set, sample_ids, accelerator.device, plan.config.num_workers)):
            if stops():
                _set_training(model, True)
                return None
            num_real = min(max(num_samples - start, 0), size)
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
    model.training = training  # what is wrapped around a model may pass it on, and keep its own
