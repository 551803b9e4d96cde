"""Wraps model and optimizer for the config file's parallelism, and chooses the Trainer."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..data.batches import ForwardStep
from ..plan import Plan
from . import deepspeed
from .accelerate_trainer import AccelerateTrainer
from .guards import (
    checked,
    choose_wrapped_layers,
)
from .parts import is_divided, local
from .pipeline import Pipeline, PipelineTrainer
from .tensor_parallel import parallelize, sharded_layers, tensor_parallel_size
from .trainer import Trainer

FUSED_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, forward_step: ForwardStep, plan: Plan
) -> Trainer:
    """Checks model and optimizer, and wraps them for the config's parallelism.

    Raises:
        UsageError: the DeepSpeed section contradicts the command line, or model or optimizer would not give the
            result of a single process.
    """
    forward_step = checked(forward_step, plan.micro_batch_size)
    if accelerator.distributed_type == DistributedType.FSDP:
        choose_wrapped_layers(accelerator, model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed.configure(accelerator, model, optimizer, plan)
    if accelerator.mixed_precision != "no":
        _cast_inputs_and_outputs(accelerator, model)
    if plan.config.pipeline_stages > 1:
        pipeline = Pipeline(accelerator, model, optimizer, plan)
        if plan.config.compile:
            _compile(accelerator, pipeline.stage)
        prepared = accelerator.prepare_optimizer(optimizer)
        _choose_fused_kernels(accelerator, optimizer)
        return PipelineTrainer(accelerator, pipeline, prepared, forward_step, plan)
    if plan.config.compile:
        _compile(accelerator, model)
    if tensor_parallel_size(accelerator) > 1:
        parallelize(accelerator, model, optimizer)
    model, prepared = _hand_to_accelerate(accelerator, model, optimizer)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed.load_models_whole(accelerator)
        return deepspeed.DeepSpeedTrainer(accelerator, model, prepared, forward_step, plan)
    _choose_fused_kernels(accelerator, optimizer)
    return AccelerateTrainer(accelerator, model, prepared, forward_step, plan)


def _hand_to_accelerate(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Any]:
    """Accelerate's `prepare`. Under tensor parallelism Accelerate reads the tensor-parallel size from the model: from
    its attribute `tp_size`, or from the config of a transformers model, where that attribute cannot be set."""
    size, config = tensor_parallel_size(accelerator), getattr(model, "config", None)
    if size == 1:
        return accelerator.prepare(model, optimizer)
    before = getattr(config, "distributed_config", ...)
    if config is None:
        model.tp_size = size  # type: ignore[assignment]  # torch's annotation is too narrow
    else:
        config.distributed_config = {"tp_size": size}
    weights = [group["params"] for group in optimizer.param_groups]
    prepared = accelerator.prepare(model, optimizer)
    # Accelerate finds the optimizer's weights by their addresses, and shards without elements have none.
    for group, own in zip(optimizer.param_groups, weights):
        group["params"] = own
    if config is not None:  # it must not be exported
        if before is ...:
            del config.distributed_config
        else:
            config.distributed_config = before
    return prepared


def _choose_fused_kernels(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer of torch update all weights in one kernel. Leaves the choice of the recipe, if it made one."""
    weights = [local(weight) for group in optimizer.param_groups for weight in group["params"]]
    chosen = any(optimizer.defaults.get(name) is not None for name in ("fused", "foreach"))
    chosen = chosen or any(optimizer.defaults.get(name) for name in ("capturable", "differentiable"))
    # A fused kernel hides the steps that loss scaling skips, and ignores the strides of a weight with gaps.
    if (
        not chosen
        and accelerator.scaler is None
        and _has_fused_kernel(optimizer)
        and all(weight.is_floating_point() and _is_dense(weight) for weight in weights)
    ):
        optimizer.defaults["fused"] = True
        for group in optimizer.param_groups:
            group["fused"] = True


def _has_fused_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch 2.13 has a kernel that gives the same result. That of SGD fails on DTensors, and with momentum if
    a weight gets its first gradient later than others."""
    if type(optimizer) in FUSED_ADAM:
        return True
    groups = optimizer.param_groups
    plain = not any(group.get("momentum") or any(map(is_divided, group["params"])) for group in groups)
    return type(optimizer) is torch.optim.SGD and plain


def _is_dense(weight: Tensor) -> bool:
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


def _compile(accelerator: Accelerator, model: nn.Module) -> None:
    """Compiles in place, to keep the names of the weights. If FSDP gathers weights layer by layer, compiles each layer
    separately, as torchtitan does: gathering cannot be part of a graph."""
    sizes = accelerator.parallelism_config
    is_sharded = accelerator.distributed_type == DistributedType.FSDP or (sizes is not None and sizes.dp_shard_enabled)
    for module in (is_sharded and sharded_layers(model)) or [model]:
        # Not module.compile(): it silently skips torch's own modules, for example Sequential.
        module.forward = torch.compile(module.forward)


def _cast_inputs_and_outputs(accelerator: Accelerator, model: nn.Module) -> None:
    """Makes FSDP2 and DeepSpeed take float32 inputs and return float32 outputs, as Accelerate's autocast does under
    DDP. FSDP2 does not cast outputs; DeepSpeed casts no outputs and, in bf16, no inputs."""
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
