"""The story of a training run, told once."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Dataset

from common.checkpoint import export_model, find_checkpoint, save_checkpoint
from common.config import RunConfig
from common.data import batches, check_dataset
from common.plan import Plan
from common.profile import profile
from common.record import OutputDir, Recorder
from common.schedule import learning_rate_factor
from common.start import data_shares
from common.step import ForwardStep, prepare

Metrics = dict[str, float]


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_step: ForwardStep,
    train_set: Dataset,
    eval_set: Dataset,
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
    with OutputDir(accelerator, plan):
        checkpoint = find_checkpoint(accelerator, plan)
        first_step = checkpoint.step if checkpoint else 0
        if first_step >= plan.num_steps:
            accelerator.print(f"nothing to do: {checkpoint.path} is at step {first_step} of {plan.num_steps}")
            return {}
        if checkpoint:
            checkpoint.load_weights(model)
        trainer = prepare(accelerator, model, optimizer, forward_step, plan)
        if checkpoint:
            checkpoint.load_optimizer(trainer)
            accelerator.print(f"resumed from {checkpoint.path}")
        set_seed(config.seed + plan.share)  # from here on other samples have another dropout
        stream = batches(train_set, plan.micro_batches(first_step), accelerator.device, config.num_workers)
        metrics: Metrics = {}
        trainer.model.train()
        with (
            # First, as it may refuse, and the recorder clears what an earlier run left behind.
            profile(accelerator, plan, plan.num_steps - first_step) as step_profiler,
            Recorder(accelerator, plan, first_step, tokens_per_sample, flops_per_sample) as recorder,
        ):
            for step in range(first_step, plan.num_steps):
                # A step that the loss scaler skips does not advance the schedule.
                position = step - recorder.num_skipped
                factor = learning_rate_factor(config.lr_schedule, position, plan.num_steps, config.warmup_steps)
                learning_rate = trainer.set_learning_rate(factor)
                micro_batches = [next(stream) for _ in range(plan.accumulation)]
                result = trainer.step(micro_batches, wants_norm=plan.logs(step))
                recorder.add(result)
                step_profiler()
                if plan.logs(step):
                    recorder.training(step, learning_rate, result)
                elif plan.evaluates(step) or plan.saves(step):
                    recorder.check_finite(step, result)
                if plan.evaluates(step):
                    recorder.pause()
                    with trainer.averaged_weights():
                        metrics = summarize(evaluate(accelerator, trainer.model, forward_step, eval_set, plan))
                    recorder.evaluation(step, metrics)
                    recorder.resume()
                if plan.saves(step):
                    recorder.pause()
                    save_checkpoint(trainer, step)
                    recorder.resume()
            with trainer.averaged_weights():
                export_model(trainer, Path(config.output_dir) / "model")
    return metrics


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, forward_step: ForwardStep, eval_set: Dataset, plan: Plan
) -> Metrics:
    """Mean of each metric over the evaluation set, each sample counted exactly once.

    Every process runs the same number of forward passes, because sharded models wait for each
    other; the last ones are padded with samples that are not counted.

    Returns:
        {metric: mean}, the same in every process.
    """
    size, num_samples = plan.micro_batch_size, len(eval_set)
    num_passes = -(-num_samples // (size * plan.num_shares))
    # Pass i of process p holds samples (i * num_shares + p) * size and up; those past the end are padding.
    starts = [(index * plan.num_shares + plan.share) * size for index in range(num_passes)]
    sample_ids = (torch.arange(start, start + size).clamp_(max=num_samples - 1) for start in starts)
    sums: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    model.eval()
    for start, batch in zip(starts, batches(eval_set, sample_ids, accelerator.device, plan.config.num_workers)):
        num_real = min(max(num_samples - start, 0), size)
        values = forward_step(model, batch)
        weight = batch.get("weight", torch.ones(size, device=accelerator.device))[:num_real].double()
        total += weight.sum()
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + (value[:num_real].double() * weight).sum()
    model.train()
    *means, total = accelerator.reduce(torch.stack([*sums.values(), total]), "sum").tolist()
    return {name: mean / total for name, mean in zip(sums, means)}
