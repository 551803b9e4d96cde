"""What a layout cannot train, as far as it shows before a step. A run raises the first refusal; `accelerate-recipes
doctor` asks for all of them."""

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..layout import Kind
from ..plan import Plan
from . import deepspeed, fsdp
from .batch_loss import BatchLossFn
from .sequence import divider_of
from .stages import check_pipeline
from .tensor_parallel import check_plan


def check_trainable(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, batch_loss: BatchLossFn | None = None
) -> None:
    """Raises UsageError for a model, an optimizer or a loss that the run's layout cannot train, or would train with
    another result than one process."""
    check_batch_loss(batch_loss, plan)
    for check in CHECKS:
        check(model, optimizer, plan)


def check_batch_loss(batch_loss: BatchLossFn | None, plan: Plan) -> None:
    """A loss that compares samples, whose two passes a pipeline does not have."""
    if batch_loss is not None and plan.layout.kind == Kind.PIPELINE:
        raise UsageError(
            "batch_loss needs two passes per step, which a pipeline does not have: type --config_file "
            "accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """An optimizer that fails under `fit`, or weights outside the model, which no process would synchronize."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls the model several times a step, which fit does not support: use another optimizer"
        )
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        raise UsageError(f"{name} has a tensor as learning rate: give it a float")
    if plan.layout.precision == "fp16" and any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError("fused=True hides the steps that the loss scaling of fp16 skips: remove it")
    given = {weight for group in optimizer.param_groups for weight in group["params"]}
    if outside := given - set(model.parameters()):
        raise UsageError(
            f"the optimizer was given a weight of shape {tuple(outside.pop().shape)} that is not in "
            f"{type(model).__name__}: give fit one module that holds all weights"
        )


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Weights that FSDP or DeepSpeed cannot shard or would silently cast."""
    kind = plan.layout.kind
    if kind not in (Kind.FSDP2, Kind.DEEPSPEED):
        return
    for name, weight in model.named_parameters():
        if weight.ndim == 0:
            raise UsageError(f"{name} has no dimension that {kind} could shard: give it the shape (1,)")
        if weight.numel() == 0:
            raise UsageError(f"{name} has no elements, which {kind} does not support: remove it from the model")
        if casts_weights(plan) and weight.dtype in (torch.float64, torch.complex64, torch.complex128):
            raise UsageError(
                f"{name} is {str(weight.dtype).removeprefix('torch.')}, which {kind} would cast: type "
                "--config_file accelerate_configs/ddp.yaml, or make it float32"
            )


def casts_weights(plan: Plan) -> bool:
    """Whether all weights become float32 or lower, without imaginary parts: under FSDP in bf16, and DeepSpeed."""
    kind = plan.layout.kind
    return kind == Kind.DEEPSPEED or (kind == Kind.FSDP2 and plan.layout.precision != "float32")


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Layers that FSDP2 cannot gather, tensor parallelism cannot divide, or a pipeline cannot cut into stages; samples
    whose tokens cannot be shared."""
    layout = plan.layout
    if layout.sequence > 1:
        divider_of(model, layout.sequence)
    if layout.kind == Kind.FSDP2:
        fsdp.wrapped_classes(model)
    elif layout.kind == Kind.TENSOR:
        check_plan(model, layout.tensor)
    elif layout.kind == Kind.PIPELINE:
        check_pipeline(model, layout.stages)


def check_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """What DeepSpeed's section contradicts."""
    if plan.layout.kind == Kind.DEEPSPEED:
        deepspeed.check_section(plan)


CHECKS = (check_optimizer, check_weights, check_layers, check_deepspeed)
