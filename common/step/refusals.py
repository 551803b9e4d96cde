"""Refuses models and optimizers that no layout can train, before the first step."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UsageError
from ..plan import Plan
from ..weights.shards import is_divided
from .options import FitOptions

# Arguments and options of `fit`; the first two are required, or their default is not None.
FUNCTIONS = ("forward_step", "summarize", "examples", "collate_fn", "sampler", "schedule", "export", "batch_loss")


def check_given(model: Any, optimizer: Any, given: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raises UsageError for something that is not a module, optimizer, function or option, or that is already wrapped:
    `fit` wraps it itself, after the parity check, which needs the recipe's own. `given`: arguments of `fit`."""
    if "accelerator" in given and not hasattr(given["accelerator"], "layout"):
        raise UsageError(f"the accelerator is {_named(given['accelerator'])}: use accelerator = start(config)")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {_named(model)}", "expected one torch.nn.Module that holds everything you train"
        )
    options, known = given.get("options", {}), FitOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise UsageError(f"fit has no option {unknown[0]}", advice)
    for name, value in {**given, **options}.items():
        if name in FUNCTIONS and not callable(value) and (value is not None or name in FUNCTIONS[:2]):
            raise UsageError(f"{name} is {_named(value)}", "give fit the function itself, not its result")
    prepared = [part for part in (model, optimizer) if getattr(part, "_is_accelerate_prepared", False)]
    if prepared or isinstance(optimizer, AcceleratedOptimizer):
        name = type(prepared[0] if prepared else optimizer).__name__
        raise UsageError(f"{name} is already prepared, and fit does this itself", "remove accelerator.prepare(...)")
    if hasattr(model, "_orig_mod"):  # of torch.compile(model), whose weights have other names
        raise UsageError("the model is compiled", "give fit the model without torch.compile, and use --compile")
    wrapped = any(isinstance(module, DataParallel | DistributedDataParallel) for module in model.modules())
    if wrapped or any(map(is_divided, model.parameters())):
        raise UsageError(
            f"{type(model).__name__} is already wrapped for several processes, and fit does this itself",
            "give fit the model without the wrapper",
        )
    _check_is_optimizer(optimizer)


def _check_is_optimizer(optimizer: Any) -> None:
    advice = "use, for example, torch.optim.AdamW(model.parameters(), lr=1e-3)"
    if isinstance(optimizer, torch.optim.Optimizer):
        if hasattr(optimizer, "defaults") and hasattr(optimizer, "state"):
            return
        # Like some wrappers', its constructor did not call torch's.
        advice = "call super().__init__(params, defaults) in its constructor, or give fit the optimizer that it wraps"
    elif isinstance(optimizer, LRScheduler):
        advice = "use --lr_schedule, or schedule= in the call of fit, for the rates, and give fit only the optimizer"
    elif isinstance(optimizer, list | tuple | dict):
        advice = 'type torch.optim.AdamW([{"params": [...], "lr": 1e-3}, {"params": [...], "lr": 1e-4}])'
    elif isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        advice = f"give fit the {type(inner).__name__} in it"
    raise UsageError(f"the optimizer is {_named(optimizer)}: expected one whole torch.optim.Optimizer", advice)


def _named(value: Any) -> str:
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    return f"of the type {type(value).__name__}"


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses an optimizer that fails under `fit`, or weights outside the model, which nothing would synchronize."""
    name = type(optimizer).__name__
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(isinstance(rate, Tensor) for rate in rates):
        raise UsageError(f"{name} has a tensor as learning rate", "give it a float")
    if None in rates:
        by_itself = any(group.get("relative_step") for group in optimizer.param_groups)
        raise UsageError(
            f"{name} has no learning rate, which fit sets in each step",
            f"give it lr=1e-3, for example{', with relative_step=False and warmup_init=False' * by_itself}",
        )
    if plan.layout.precision == "fp16" and any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError("fused=True hides the steps that the loss scaling of fp16 skips", "remove it")
    if outside := {weight for group in optimizer.param_groups for weight in group["params"]} - set(model.parameters()):
        raise UsageError(
            f"the optimizer was given a weight of shape {tuple(outside.pop().shape)} that is not in "
            f"{type(model).__name__}",
            "give fit one module that holds all weights",
        )


def sizes_that_divide(number: int) -> str:
    """The sizes of groups that can share this number of heads or experts, for messages."""
    return ", ".join(str(size) for size in range(2, number + 1) if number % size == 0)
