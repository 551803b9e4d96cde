"""One optimizer step, under Accelerate, DeepSpeed or a pipeline: the only place where they differ."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.average import WeightAverage
from common.checks import (
    check_all_used,
    check_optimizer,
    check_same_way,
    check_weights,
    checked,
    choose_wrapped_layers,
    freeze_what_is_not_trained,
    say_what_depends_on_the_layout,
)
from common.data import Batch, ForwardStep
from common.errors import UsageError
from common.parallel import parallelize, sharded_layers, tensor_parallel_size
from common.pipeline import Pipeline
from common.plan import Plan
from common.start import load_models_whole

DIVIDES = (DistributedType.FSDP, DistributedType.DEEPSPEED)  # weights, gradients or optimizer state


@dataclass
class StepResult:
    """One optimizer step, seen by this process. Tensors stay on the device: to read them stops it.

    Attributes:
        losses: sum over this process's samples of weight × loss, 0-dim, for each micro-batch.
        weight: sum over this process's samples of their weights; their number where a batch has
            no "weight".
        grad_norm: L2 norm of the gradient of the whole model over the global batch, before
            clipping; None where nobody asked.
        skipped: the loss scaler met an overflow and the weights were not changed.
    """

    losses: list[Tensor]
    weight: Tensor | float
    grad_norm: Tensor | float | None
    skipped: bool = False


@dataclass
class Trainer:
    """What a step works on: model and optimizer as `prepare` made them, and how to call them."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: AcceleratedOptimizer
    forward_step: ForwardStep
    plan: Plan
    average: WeightAverage | None = None
    way: int | None = None  # through the model, which ZeRO wants all forward passes to take

    def __post_init__(self) -> None:
        share = self.plan.num_shares / self.plan.config.batch_size
        self.mean_scale = torch.tensor(share, device=self.accelerator.device)  # made once: a copy would stop a GPU

    @property
    def module(self) -> nn.Module:
        """The recipe's own module, inside what the parallelism wrapped around it."""
        # Not accelerator.unwrap_model: it imports deepspeed, which takes seconds, wherever that is installed.
        if self.pipeline is not None:
            return self.pipeline.model
        if self.uses_deepspeed:
            return self.engine.module
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, of which this process is a stage."""
        return self.model if isinstance(self.model, Pipeline) else None

    @property
    def engine(self) -> Any:
        """DeepSpeed's, where it is used: what `prepare` made of the model."""
        return self.model

    @property
    def uses_deepspeed(self) -> bool:
        """Whether the engine of DeepSpeed holds the weights and takes the steps."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def set_learning_rate(self, factor: float) -> float:
        """Sets each parameter group to its peak rate × factor; returns the first group's."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def step(self, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """Takes one optimizer step on this process's share of the global batch.

        The gradient is that of the mean loss over all samples of the step, weighted by "weight"
        where the batch has one, whatever the number of processes and micro-batches.
        """
        take = deepspeed_step if self.uses_deepspeed else pipeline_step if self.pipeline else accelerate_step
        result = take(self, micro_batches, wants_norm)
        if self.average is not None and not result.skipped:
            self.average.update()
        return result

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of it as JSON, beside tensors."""
        num_averaged = 0 if self.average is None else self.average.num_updates
        return {"num_averaged": num_averaged, "loss_scale": _loss_scale_state(self)}

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        """Puts back what `numbers` gave; a loss scale only where there is one in both runs."""
        if self.average is not None:
            self.average.num_updates = numbers["num_averaged"]
        if scaler := self.accelerator.scaler:
            if "growth_factor" in numbers["loss_scale"]:
                scaler.load_state_dict(numbers["loss_scale"])
        elif self.uses_deepspeed:
            for name, value in numbers["loss_scale"].items():
                if name in _loss_scale_state(self):
                    setattr(self.engine.optimizer.loss_scaler, name, value)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within it the model has the averages of `--ema_decay` as its weights; without that flag, its own."""
        return nullcontext() if self.average is None else self.average.applied(self.model)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, forward_step: ForwardStep, plan: Plan
) -> Trainer:
    """Hands model and optimizer to the parallelism of the config.

    Raises:
        UsageError: the DeepSpeed section sets what the command line decides, or model or optimizer would not
            give the result of one process.
    """
    check_optimizer(accelerator, optimizer)
    freeze_what_is_not_trained(accelerator, model, optimizer)
    check_weights(accelerator, model)
    say_what_depends_on_the_layout(accelerator, model, plan)
    forward_step = checked(forward_step, plan.micro_batch_size)
    if accelerator.distributed_type == DistributedType.FSDP:
        choose_wrapped_layers(accelerator, model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _configure_deepspeed(accelerator, model, optimizer, plan)
    if accelerator.mixed_precision != "no":
        _cast_inputs_and_outputs(accelerator, model)
    if plan.config.pipeline_stages > 1:
        model = Pipeline(accelerator, model, optimizer, plan)
        if plan.config.compile:
            _compile(accelerator, model.stage)
        return _trainer(accelerator, model, accelerator.prepare_optimizer(optimizer), forward_step, plan)
    if plan.config.compile:
        _compile(accelerator, model)
    if tensor_parallel_size(accelerator) > 1:
        parallelize(accelerator, model, optimizer)
    with _says_that_it_is_divided(accelerator, model):
        model, optimizer = accelerator.prepare(model, optimizer)
    load_models_whole(accelerator)
    return _trainer(accelerator, model, optimizer, forward_step, plan)


def _trainer(
    accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer, forward_step: ForwardStep, plan: Plan
) -> Trainer:
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    average = WeightAverage(optimizer, plan.config.ema_decay) if plan.config.ema_decay else None
    return Trainer(accelerator, model, optimizer, forward_step, plan, average)


def accelerate_step(trainer: Trainer, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
    """One process, DDP, FSDP2 and tensor parallelism."""
    accelerator, optimizer, max_norm = trainer.accelerator, trainer.optimizer, trainer.plan.config.max_grad_norm
    scale, weight = _loss_scale(trainer, micro_batches)
    losses = []
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(trainer.model):
            loss = _loss_sum(trainer, batch)
            accelerator.backward(loss, gradient=scale.to(loss))  # as backward(loss * scale), an operation less
        losses.append(loss.detach())
    grad_norm = _clip(trainer, max_norm or torch.inf) if max_norm or wants_norm else None
    # Without a loss scaler Accelerate's wrapper adds nothing to a step but time.
    inner = optimizer if accelerator.scaler is not None else optimizer.optimizer
    inner.step()
    inner.zero_grad()
    skipped = accelerator.scaler is not None and optimizer.step_was_skipped
    return StepResult(losses, weight, grad_norm, skipped)


def _clip(trainer: Trainer, max_norm: float) -> Tensor:
    """Clips to the norm of the gradient of the whole model, and returns that norm."""
    trainer.accelerator.unscale_gradients(trainer.optimizer)
    parameters = [weight for weight in trainer.model.parameters() if weight.grad is not None]
    if not any(hasattr(weight, "device_mesh") for weight in parameters):
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    # Tensors that are divided among the same processes have a norm together; the norms make that of all.
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    groups: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [nn.utils.get_total_norm(group) for group in groups.values()]
    norm = nn.utils.get_total_norm([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms])
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_ does
    return norm


def deepspeed_step(trainer: Trainer, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
    """ZeRO 1 to 3. The engine averages over processes and accumulation, and clips by itself."""
    engine = trainer.engine
    scale, weight = _loss_scale(trainer, micro_batches)
    losses = []
    for index, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
        loss = _loss_sum(trainer, batch)
        engine.backward(loss * (scale * len(micro_batches)))
        losses.append(loss.detach())
    engine.step()
    skipped = not engine.was_step_applied()
    if skipped and trainer.accelerator.mixed_precision != "fp16":
        return StepResult(losses, weight, torch.inf)  # without loss scaling it skips without a word
    return StepResult(losses, weight, engine.get_global_grad_norm(), skipped)


def pipeline_step(trainer: Trainer, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
    """A pipeline, whose last stage knows the losses."""
    pipeline, max_norm = trainer.pipeline, trainer.plan.config.max_grad_norm
    assert pipeline is not None
    scale, weight = _loss_scale(trainer, micro_batches)
    losses = pipeline.backward(trainer.forward_step, micro_batches, scale)
    grad_norm = pipeline.clip(max_norm or torch.inf) if max_norm or wants_norm else None
    trainer.optimizer.optimizer.step()
    trainer.optimizer.optimizer.zero_grad()
    return StepResult(losses, weight if pipeline.is_last else 0.0, grad_norm)


def _loss_scale_state(trainer: Trainer) -> dict[str, float]:
    """Of the loss scaling of fp16; nothing in other precisions."""
    if trainer.accelerator.scaler is not None:
        return trainer.accelerator.scaler.state_dict()
    if not trainer.uses_deepspeed or trainer.accelerator.mixed_precision != "fp16":
        return {}
    scaler = vars(trainer.engine.optimizer.loss_scaler)
    return {name: value for name, value in scaler.items() if isinstance(value, int | float)}


def _loss_sum(trainer: Trainer, batch: Batch) -> Tensor:
    loss = trainer.forward_step(trainer.model, batch)["loss"]
    if trainer.accelerator.distributed_type in DIVIDES or isinstance(trainer.model, DistributedDataParallel):
        rank = trainer.accelerator.process_index
        way = check_all_used(trainer.module, loss, rank)
        if trainer.uses_deepspeed:
            trainer.way = check_same_way(trainer.way, way, rank)
    return (loss * batch["weight"]).sum() if "weight" in batch else loss.sum()


def _loss_scale(trainer: Trainer, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor | float]:
    """(factor that makes the sum of a process's losses its part of the global mean, where
    gradients are averaged over processes; this process's total weight)"""
    plan = trainer.plan
    if "weight" not in micro_batches[0]:
        return trainer.mean_scale, plan.config.batch_size / plan.num_shares
    weight = torch.stack([batch["weight"].sum() for batch in micro_batches]).sum()
    # Where several processes see the same samples, the sum counts these as often.
    return trainer.accelerator.num_processes / trainer.accelerator.reduce(weight, "sum"), weight


def _configure_deepspeed(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan
) -> None:
    """Writes what the command line decides into DeepSpeed's config, which would otherwise clip at
    1.0 and accumulate as its own section says."""
    if plan.config.ema_decay:
        raise UsageError(
            "--ema_decay does not work under DeepSpeed, which keeps the weights to itself: type "
            "--config_file accelerate_configs/fsdp2.yaml"
        )
    section = accelerator.deepspeed_plugin.deepspeed_config
    for name, owner in (("optimizer", "the recipe's optimizer"), ("scheduler", "--lr_schedule")):
        if name in section:  # with a scheduler of its own DeepSpeed would set other learning rates than we tell
            raise UsageError(f"the DeepSpeed config has a section {name}, which {owner} decides: remove it there")
    if section.get("zero_optimization", {}).get("stage") not in (1, 2, 3):
        raise UsageError("the DeepSpeed config has no zero_optimization with stage 1, 2 or 3: write it there")
    decided = {
        "train_micro_batch_size_per_gpu": (plan.micro_batch_size, "--micro_batch_size"),
        "gradient_accumulation_steps": (plan.accumulation, "--batch_size and --micro_batch_size"),
        "train_batch_size": (plan.config.batch_size, "--batch_size"),
        "gradient_clipping": (plan.config.max_grad_norm, "--max_grad_norm"),
    }
    for key, (value, flag) in decided.items():
        given = section.get(key, "auto")
        if given not in ("auto", value):
            raise UsageError(f"deepspeed_config sets {key}: {given}, but {flag} makes it {value}: remove it there")
        section[key] = value
    # By default its buffers have room for 500 million values each, 2 GB, however small the model is.
    num_weights = sum(weight.numel() for weight in model.parameters())
    bucket_size = min(num_weights + num_weights % 2, 500_000_000)  # it wants an even one
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        section.setdefault("zero_optimization", {}).setdefault(bucket, bucket_size)
    accelerator.gradient_accumulation_steps = plan.accumulation
    # DeepSpeed's own CPU optimizer exists for Adam only; others step with torch's.
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    section.setdefault("zero_force_ds_cpu_optimizer", is_adam)


def _compile(accelerator: Accelerator, model: nn.Module) -> None:
    """Compiles in place, so that names of weights stay. Where weights are gathered layer by layer, the
    layers are compiled each for itself: gathering is no part of a graph (as torchtitan does)."""
    sizes = accelerator.parallelism_config
    is_sharded = accelerator.distributed_type == DistributedType.FSDP or (sizes is not None and sizes.dp_shard_enabled)
    for module in (is_sharded and sharded_layers(model)) or [model]:
        # Not module.compile(): without a word it compiles nothing of torch's own modules, such as Sequential.
        module.forward = torch.compile(module.forward)


@contextmanager
def _says_that_it_is_divided(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Accelerate wants to read from a model how many processes divide it: from an attribute, or, of a
    transformers model, from its config, where it must not stay and be exported."""
    size, config = tensor_parallel_size(accelerator), getattr(model, "config", None)
    if size == 1:
        yield
    elif config is None:
        model.tp_size = size  # type: ignore[assignment]  # torch means any value
        yield
    else:
        before = getattr(config, "distributed_config", None)
        config.distributed_config = {"tp_size": size}
        yield
        config.distributed_config = before


def _cast_inputs_and_outputs(accelerator: Accelerator, model: nn.Module) -> None:
    """Under DDP, Accelerate's autocast takes float32 inputs and returns float32 outputs. Makes the
    others the same: FSDP2 casts no outputs, DeepSpeed neither."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.mixed_precision == "bf16":
        model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        model.register_forward_hook(lambda module, args, output: _cast(output, torch.float32))


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return _cast(args, torch.bfloat16), _cast(kwargs, torch.bfloat16)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
