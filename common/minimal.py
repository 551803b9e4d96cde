"""The loop in one file, for `accelerate-recipes new --minimal`: one process or DDP, with the result of loop.py.

Left out: the check of the first steps, checkpoints and resume, records, signals and the watchdog.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .command_line import ConfigT, parse
from .config import RunConfig
from .data.batches import (
    Batch,
    CollateFn,
    Examples,
    ForwardStep,
    MapDataset,
    Metrics,
    batches,
    checked_datasets,
    numbered,
)
from .data.mixture import by_source, of_sources, without_sources
from .environment import has_gpu, is_true, rank, share_cores, world_size
from .errors import NonFiniteError, RunError, UsageError
from .layout import Layout
from .norms import clip, norm_of
from .plan import Plan, Sampler
from .schedule import ScheduleFn
from .seeds import EVALUATION, SUMMARY, UPDATE, seed_forward

# Flags of the other loop.
LEFT_OUT = (
    *("async_save", "check_steps", "deterministic", "early_stopping_patience", "ema_decay", "evaluate_only"),
    *("expert_parallel", "export_dtype", "hang_timeout", "keep_checkpoints", "metric_for_best_model"),
    *("pipeline_stages", "report_to", "resume_from_checkpoint", "save_every", "save_predictions"),
)
OTHERS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
WEIGHT = "weight of the sample"


def run(main: Callable[[ConfigT], Any], config_class: type[ConfigT]) -> NoReturn:
    """Parses the command line, calls `main(config)`, and in the main process the function that it may return.

    Exit codes: 0 done, 2 the user's mistake, 3 a loss or gradient that is not finite, 1 anything else.
    """
    try:
        config = parse(config_class, without=LEFT_OUT)
        for name in LEFT_OUT:
            if getattr(config, name) != RunConfig.__dataclass_fields__[name].default:
                raise UsageError(f"Config sets {name}, which this loop leaves out: remove it from the script")
        afterwards = main(config)
    except RunError as error:
        time.sleep(0 if rank() == 0 else 5)  # if several processes have it, the first one prints
        sys.stderr.write(f"{error.label}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if callable(afterwards) and rank() == 0:
        afterwards()
    sys.exit(0)


def start(config: RunConfig) -> Accelerator:
    """Joins the other processes; without a GPU, processes on the CPU stand in for GPUs.

    Raises:
        UsageError: a config for another kind of parallelism or fp16, or an output_dir with a model.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if any(map(is_true, OTHERS)) or precision not in ("no", "bf16"):
        raise UsageError(
            "this project was made with --minimal, for one process or DDP in float32 or bf16: type --mixed_precision "
            "bf16 and --config_file accelerate_configs/ddp.yaml, or make one without --minimal"
        )
    if (config.output_dir / "model").exists() and not config.overwrite_output_dir:
        raise UsageError(f"{config.output_dir} holds a model: type --overwrite_output_dir, or another --output_dir")
    if not has_gpu():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    share_cores()
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    if accelerator.num_processes != world_size():
        raise UsageError(f"Accelerate runs {accelerator.num_processes} of {world_size()} processes: use ddp.yaml")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder's sets padding to 0 in some evaluations
    set_seed(config.seed)  # the same in every process, so that each builds the same model
    accelerator.print(f"{world_size()} processes on {accelerator.device.type}, batch {config.batch_size}")
    return accelerator


def fit(  # noqa: C901  # it tells the whole run
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_step: ForwardStep,
    train_set: MapDataset,
    eval_set: MapDataset | Mapping[str, MapDataset],
    config: RunConfig,
    summarize: Callable[[Metrics], Metrics] = dict,
    tokens_per_sample: int | None = None,
    flops_per_sample: float | None = None,
    examples: Callable[[Examples], Metrics] | None = None,
    collate_fn: CollateFn | None = None,
    sampler: Sampler | None = None,
    schedule: ScheduleFn | None = None,
    export: Callable[[Path], Any] | None = None,
    batch_loss: Any = None,
) -> Metrics:
    """Trains, evaluates, prints, and exports the model to `<output_dir>/model/`.

    Args:
        accelerator: from `start(config)`.
        model: the same in every process.
        optimizer: over its weights; its learning rates are the peaks of the schedule.
        forward_step: (model, batch) -> metrics, each of shape (batch,), with the "loss". A "weight" of the batch, of
            shape (batch,), weighs all means.
        train_set: map-style dataset of dicts of tensors.
        eval_set: the same kind, or {name: set}.
        config: the flags.
        summarize: means over an evaluation set -> metrics to report.
        tokens_per_sample, flops_per_sample: not used here.
        examples: {name: values of all samples of an evaluation set} -> more metrics.
        collate_fn: samples -> batch.
        sampler: (epoch, generator) -> order of sample ids.
        schedule: (step, num_steps, warmup_steps) -> share of the peak learning rate.
        export: folder -> None; writes more files beside the exported weights.
        batch_loss: not supported.

    Returns:
        The metrics of the last evaluation.

    Raises:
        UsageError: flags or data that the run cannot use.
        NonFiniteError: the norm of a gradient is not finite.
    """
    if batch_loss is not None:
        raise UsageError("a batch_loss needs the whole loop: make the project without --minimal")
    forward_step, sampler = by_source(train_set, eval_set, forward_step, sampler)
    values_of = numbered(forward_step)
    train_set, eval_sets = checked_datasets(train_set, eval_set, collate_fn)
    layout = Layout(num_processes=world_size(), rank=rank())
    plan = Plan.of(config, layout, len(train_set), schedule, sampler)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in {*model.parameters()} - {*weights}:
        weight.requires_grad_(False)
    if config.compile:
        model.forward = torch.compile(model.forward)
    wrapped = accelerator.prepare_model(model.train())
    peaks = [group["lr"] for group in optimizer.param_groups]
    stream = batches(train_set, plan.micro_batches(), accelerator.device, config)
    metrics, since, started = Metrics(), 0, time.perf_counter()
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss and weight since the last line
    for step in range(plan.num_steps):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * plan.factor_at(step)
        micro_batches = [next(stream) for _ in range(plan.accumulation)]
        totals += _backward(accelerator, wrapped, values_of, plan, step, micro_batches)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = norm_of(gradients)
        if not math.isfinite(norm):
            raise NonFiniteError(f"grad_norm is {float(norm)} at step {step + 1}: try a lower --learning_rate")
        if config.max_grad_norm:
            clip(gradients, norm, config.max_grad_norm)
        seed_forward(config.seed, step, UPDATE, accelerator.device)  # for an optimizer that draws
        optimizer.step()
        optimizer.zero_grad()
        if plan.logs(step + 1):
            loss, weight = accelerator.reduce(totals, "sum").tolist()
            mean = loss / (weight or math.nan)
            speed = (step + 1 - since) * config.batch_size / (time.perf_counter() - started)
            rate = f"learning_rate {optimizer.param_groups[0]['lr']:.4g}  {speed:,.0f} samples/s"
            accelerator.print(f"step {step + 1}/{plan.num_steps}  loss {mean:.7g}  {rate}", flush=True)
            totals, since, started = torch.zeros_like(totals), step + 1, time.perf_counter()
        if plan.evaluates(step + 1):
            for name, dataset in eval_sets.items():
                found = _evaluate(accelerator, wrapped, values_of, plan, step + 1, dataset, summarize, examples)
                metrics |= {f"{name}/{key}" if name else key: float(value) for key, value in found.items()}
            shown = "  ".join(f"{name} {value:.5g}" for name, value in metrics.items())
            accelerator.print(f"step {step + 1}/{plan.num_steps}  evaluation: {shown}", flush=True)
    if accelerator.is_main_process:
        _export(model, config.output_dir / "model", export)
    accelerator.wait_for_everyone()
    return metrics


def _backward(
    accelerator: Accelerator, model: Any, values_of: ForwardStep, plan: Plan, step: int, micro_batches: list[Batch]
) -> Tensor:
    """Computes the gradient of the mean loss over the global batch. Returns this process's (sum of weight × loss, sum
    of the weights)."""
    own = torch.stack([_weights(batch, plan, accelerator).sum() for batch in micro_batches]).sum()
    total = accelerator.reduce(own.clone(), "sum")
    scale = accelerator.num_processes / total.where(total > 0, 1)  # DDP takes the mean over the processes
    losses = []
    for index, batch in enumerate(micro_batches):
        seed_forward(plan.config.seed, step, plan.row(index), accelerator.device)  # for dropout
        model.require_backward_grad_sync = index == len(micro_batches) - 1  # of DDP: sums the gradients once
        loss = (values_of(model, batch, step)["loss"] * _weights(batch, plan, accelerator)).sum()
        (loss * scale).backward()
        losses.append(loss.detach())
    return torch.stack([torch.stack(losses).double().sum(), own.double()])


def _weights(batch: Batch, plan: Plan, accelerator: Accelerator) -> Tensor:
    return batch["weight"] if "weight" in batch else torch.ones(plan.micro_batch_size, device=accelerator.device)


@torch.no_grad()
def _evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    values_of: ForwardStep,
    plan: Plan,
    step: int,
    dataset: MapDataset,
    summarize: Callable[[Metrics], Metrics],
    examples: Callable[[Examples], Metrics] | None,
) -> Metrics:
    """The metrics of a set. All processes take the same number of passes; samples that fill the last do not count."""
    size, num_samples, rows = plan.micro_batch_size, len(dataset), dict[str, list[Tensor]]()
    starts = [plan.row(index) * size for index in range(-(-num_samples // (size * accelerator.num_processes)))]
    samples = ((EVALUATION, torch.arange(start, start + size).clamp_(max=num_samples - 1)) for start in starts)
    model.eval()
    for index, batch in enumerate(batches(dataset, samples, accelerator.device, plan.config)):
        seed_forward(plan.config.seed, EVALUATION, plan.row(index), accelerator.device)
        for name, value in (values_of(model, batch, step) | {WEIGHT: _weights(batch, plan, accelerator)}).items():
            rows.setdefault(name, []).append(accelerator.gather(value.contiguous()))
    model.train()
    whole = {name: torch.cat(parts)[:num_samples].cpu() for name, parts in rows.items()}
    weight, means = whole.pop(WEIGHT).double(), Metrics()
    for name, value in whole.items():
        is_mean = examples is None or value.is_floating_point() or value.dtype == torch.bool
        if value.ndim == 1 and is_mean:
            means[name] = float((value.double() * weight).sum() / weight.sum())
    means = of_sources(means)
    seed_forward(plan.config.seed, EVALUATION, SUMMARY, accelerator.device)
    floats = {name: value.double() for name, value in whole.items() if value.ndim == 1 and value.is_floating_point()}
    return summarize(means) | ({} if examples is None else examples(without_sources(whole | floats)))


def _export(model: nn.Module, folder: Path, export: Callable[[Path], Any] | None) -> None:
    """Writes `model.safetensors`, what a model of transformers or PEFT has beside it, and what `export` writes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    adapter: Any = getattr(model, "peft_adapter", None)
    state = {
        name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict(keep_vars=True).items()
    }
    if adapter is not None:
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        adapter.write({name: state[name] for name in trained}, folder)
        adapter.settings.save_pretrained(str(folder))
    else:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        for part in ("config", "generation_config"):
            settings: Any = getattr(model, part, None)
            if hasattr(settings, "save_pretrained"):
                settings.save_pretrained(folder)
    if export is not None:
        export(folder)


def load_exported(output_dir: str | Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """{name: tensor} of the model that a run exported; also loads them into `model`, if given. Raises UsageError."""
    path = Path(output_dir) / "model" / "model.safetensors"
    if not path.is_file():
        raise UsageError(f"no exported model in {path.parent}: train first, or type the --output_dir of a run")
    weights = load_file(path)
    if model is not None:
        model.load_state_dict(weights)
    return weights
