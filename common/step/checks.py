"""What no layout can train, as far as it shows before a step, and what several strategies refuse."""

import difflib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UsageError
from ..norms import LOW_PRECISION
from ..plan import Plan
from ..weights.shards import is_divided
from .options import FitOptions

NEEDS_CLOSURE = "calls the model several times a step, which fit does not support"


# Arguments and options of `fit`; the first two are needed, or have another default than None.
FUNCTIONS = ("forward_step", "summarize", "examples", "collate_fn", "sampler", "schedule", "export", "batch_loss")


def check_given(model: Any, optimizer: Any, given: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raises UsageError for what is no module, no optimizer, no function or no option, or one that something has
    wrapped: `fit` does so itself, after the parity check, which needs the recipe's own. `given`: arguments of `fit`."""
    if "accelerator" in given and not hasattr(given["accelerator"], "layout"):
        raise UsageError(f"the accelerator is {_named(given['accelerator'])}: use accelerator = start(config)")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {_named(model)}", "expected one torch.nn.Module, which holds all that is trained"
        )
    options, known = given.get("options", {}), FitOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise UsageError(f"fit has no option {unknown[0]}", advice)
    for name, value in {**given, **options}.items():
        if name in FUNCTIONS and not callable(value) and (value is not None or name in FUNCTIONS[:2]):
            raise UsageError(f"{name} is {_named(value)}", "give fit the function itself, not what it returns")
    prepared = [part for part in (model, optimizer) if getattr(part, "_is_accelerate_prepared", False)]
    if prepared or isinstance(optimizer, AcceleratedOptimizer):
        name = type(prepared[0] if prepared else optimizer).__name__
        raise UsageError(f"{name} was prepared already, which fit does itself", "remove accelerator.prepare(...)")
    if hasattr(model, "_orig_mod"):  # of torch.compile(model), whose weights have other names
        raise UsageError("the model is compiled", "give fit the one before torch.compile, and use --compile")
    wrapped = any(isinstance(module, DataParallel | DistributedDataParallel) for module in model.modules())
    if wrapped or any(map(is_divided, model.parameters())):
        raise UsageError(
            f"{type(model).__name__} was wrapped for several processes already, which fit does itself",
            "give fit the model as it was before",
        )
    _check_is_optimizer(optimizer)


def _check_is_optimizer(optimizer: Any) -> None:
    given = f"the optimizer is {_named(optimizer)}"
    if isinstance(optimizer, list | tuple | dict):
        raise UsageError(
            f"{given}: expected one optimizer; a group of parameters may have settings of its own",
            'type torch.optim.AdamW([{"params": [...], "lr": 1e-3}, {"params": [...], "lr": 1e-4}])',
        )
    if isinstance(optimizer, LRScheduler):
        raise UsageError(
            f"{given}: expected the optimizer alone",
            "use --lr_schedule, or schedule= in the call of fit, for the rates",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        instead = f"give fit the {type(inner).__name__} in it" if isinstance(inner, torch.optim.Optimizer) else ""
        instead = instead or "use, for example, torch.optim.AdamW(model.parameters(), lr=1e-3)"
        raise UsageError(f"{given}: expected a torch.optim.Optimizer", instead)
    try:
        optimizer.state_dict(), optimizer.defaults
    except AttributeError as error:  # its constructor did not call that of torch, as some wrappers do
        raise UsageError(
            f"{type(optimizer).__name__} lacks what each optimizer has ({error})",
            "call super().__init__(params, defaults) in its constructor, or give fit the optimizer that it wraps",
        ) from None


def _named(value: Any) -> str:
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    return f"of the type {type(value).__name__}"


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """An optimizer that fails under `fit`, or weights outside the model, which no process would synchronize."""
    name = type(optimizer).__name__
    _check_step(optimizer)
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
    given = {weight for group in optimizer.param_groups for weight in group["params"]}
    if outside := given - set(model.parameters()):
        raise UsageError(
            f"the optimizer was given a weight of shape {tuple(outside.pop().shape)} that is not in "
            f"{type(model).__name__}",
            "give fit one module that holds all weights",
        )


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError if a step needs more than gradients."""
    # Of the class: a schedule of the recipe's own may have wrapped the object's.
    name, (_, *parameters) = type(optimizer).__name__, inspect.signature(type(optimizer).step).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each.name for each in named if each.default is each.empty]
    # SAM's step takes a closure that may be None, and then fails; its two halves have the names that its paper's code
    # gave them, in copies and relatives, too.
    in_halves = all(callable(getattr(optimizer, half, None)) for half in ("first_step", "second_step"))
    if "closure" in needed or in_halves:
        raise UsageError(f"{name} {NEEDS_CLOSURE}", "use another optimizer")
    if needed:
        raise UsageError(f"{name}.step needs {needed[0]}, and fit calls step() alone", "use another optimizer")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """A layer that cannot be trained, or not on this device."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and plan.layout.device == "cpu" and plan.layout.num_processes > 1:
            raise UsageError(
                f"{name} is a SyncBatchNorm, which several processes compute on GPUs only",
                "use GroupNorm or LayerNorm, or BatchNorm on the CPU",
            )


def check_dense_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Raises UsageError for a layer with sparse gradients, which FSDP2 and DeepSpeed cannot divide."""
    given = {weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
    for name, module in model.named_modules():
        if getattr(module, "sparse", None) is True and given & set(module.parameters(recurse=False)):
            raise UsageError(
                f"{name} has sparse gradients, which {kind} does not support",
                "use --config_file accelerate_configs/ddp.yaml, or sparse=False in its constructor, and Adam in "
                "place of SparseAdam",
            )


def sizes_that_divide(number: int) -> str:
    """For messages: the sizes of groups that can share so many heads or experts."""
    return ", ".join(str(size) for size in range(2, number + 1) if number % size == 0)


def check_divisible_weights(model: nn.Module, kind: str, casts: bool, to_float32: bool = False) -> None:
    """Raises UsageError for weights that FSDP2 or DeepSpeed cannot divide, or would silently cast.

    Args:
        model: the recipe's module.
        kind: the name of what divides them.
        casts: whether all weights become float32 or lower, without imaginary parts.
        to_float32: whether those of lower precision, too, become float32, in which one process does not train them.
    """
    high = (torch.float64, torch.complex64, torch.complex128)
    types = {*(high if casts else ()), *(LOW_PRECISION if to_float32 else ())}
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            raise UsageError(f"{name} has no elements, which {kind} does not support", "remove it from the model")
        if weight.dtype in types:
            raise UsageError(
                f"{name} is {str(weight.dtype).removeprefix('torch.')}, which {kind} would cast",
                "use --config_file accelerate_configs/ddp.yaml, or make it float32",
            )
