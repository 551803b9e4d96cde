"""What no layout can train, as far as it shows before a step, and what several kinds of parallelism refuse."""

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..plan import Plan


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


def sizes_that_divide(number: int) -> str:
    """For messages: the sizes of groups that can share so many heads or experts."""
    return ", ".join(str(size) for size in range(2, number + 1) if number % size == 0)


def check_divisible_weights(model: nn.Module, kind: str, casts: bool) -> None:
    """Raises UsageError for weights that FSDP2 or DeepSpeed cannot divide, or would silently cast.

    Args:
        model: the recipe's module.
        kind: the name of what divides them.
        casts: whether all weights become float32 or lower, without imaginary parts.
    """
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            raise UsageError(f"{name} has no elements, which {kind} does not support: remove it from the model")
        if casts and weight.dtype in (torch.float64, torch.complex64, torch.complex128):
            raise UsageError(
                f"{name} is {str(weight.dtype).removeprefix('torch.')}, which {kind} would cast: type "
                "--config_file accelerate_configs/ddp.yaml, or make it float32"
            )
