"""The optimizer of a recipe: its kernels, the weights in its parameter groups, and its steps."""

import math
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from ..errors import UsageError
from ..failure import line_of
from ..norms import LOW_PRECISION
from ..weights.shards import is_divided, local

FUSED_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def choose_fused_kernels(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Lets torch's optimizers update all weights in one kernel, with the same result, unless the recipe has chosen."""
    kind, options, groups = type(optimizer), optimizer.defaults, optimizer.param_groups
    weights = [weight for group in groups for weight in group["params"]]
    chosen = any(options.get(name) is not None for name in ("fused", "foreach"))
    chosen = chosen or any(options.get(name) for name in ("capturable", "differentiable"))
    # SGD's kernel fails on DTensors, and with momentum if a weight gets its first gradient later than others.
    is_plain = kind is torch.optim.SGD and not any(map(is_divided, weights))
    is_plain = is_plain and not any(group.get("momentum") for group in groups)
    # A fused kernel hides the steps that loss scaling skips.
    if chosen or accelerator.scaler is not None or not (kind in FUSED_ADAM or is_plain):
        return
    for weight in map(local, weights):
        # Fused kernels ignore strides of weights with gaps, and on a CPU fail with 16-bit weights (SGD, torch 2.13).
        has_gaps = torch.empty_like(weight, device="meta").stride() != weight.stride()
        if has_gaps or not weight.is_floating_point() or (weight.is_cpu and weight.dtype in LOW_PRECISION):
            return
    for settings in (options, *groups):
        settings["fused"] = True


def exchange_weights(optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Gives an optimizer divided weights in place of whole ones, {whole: divided}, with the state that it has for them.

    Splits each parameter group by device mesh: the foreach and fused kernels of the optimizers, the default on GPUs,
    refuse a list of DTensors and plain tensors, or of DTensors on different meshes."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(weight, weight) for weight in group["params"]]
    for before, after in replaced.items():
        if before in optimizer.state and after is not before:
            optimizer.state[after] = _divided_like(after, optimizer.state.pop(before))
    for index, group in enumerate(list(optimizer.param_groups)):
        meshes: dict[object, list[nn.Parameter]] = {}
        for weight in group["params"]:
            meshes.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
        if len(meshes) > 1:
            group["params"], *others = meshes.values()
            optimizer.param_groups += [group | {"params": weights, "split_from": index} for weights in others]


def _divided_like(weight: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """The state that an optimizer made in its constructor, as Adagrad does, divided like the weight now."""
    if not is_divided(weight):
        return state
    return {
        name: distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
        if isinstance(value, Tensor) and value.shape == weight.shape
        else value
        for name, value in state.items()
    }


def follow_split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Gives groups that were split from another group its options: the recipe knows only the first one."""
    for group in optimizer.param_groups:
        if "split_from" in group:
            group.update({**optimizer.param_groups[group["split_from"]], "params": group["params"]})


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor | float | None) -> None:
    """Takes a step of an optimizer, unless the norm of the gradient is known and not finite. Reading the norm would
    stall a GPU. There fused kernels look at it, as under torch's loss scaler; any other optimizer takes the step, and
    the run ends a step later. Raises UsageError if it needs a closure, or a different kind of gradients."""
    is_read = not isinstance(grad_norm, Tensor) or grad_norm.device.type == "cpu"
    if grad_norm is not None and is_read and not math.isfinite(grad_norm):
        return
    looks: Any = optimizer if not is_read and optimizer.defaults.get("fused") else None
    if looks is not None:
        looks.grad_scale, looks.found_inf = None, 1 - torch.as_tensor(grad_norm).isfinite().float()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    sparse = any(weight.grad is not None and weight.grad.is_sparse for weight in weights)
    if sparse and type(optimizer) is torch.optim.SGD:  # its fused kernel refuses these
        for group in optimizer.param_groups:
            group["fused"] = False
    try:
        optimizer.step()
    except Exception as error:
        name, line = type(optimizer).__name__, line_of(error)
        lines = [str(error), *(frame.line or "" for frame in traceback.extract_tb(error.__traceback__))]
        if any("closure" in text.lower() or "required positional argument" in text for text in lines):
            raise UsageError(
                f"{name} calls the model several times per step, or its step has arguments; fit does not support this "
                f"({line})",
                "use another optimizer",
            ) from None
        if sparse or "dense gradients" in str(error):  # SparseAdam, also where a table's gradient is divided
            raise UsageError(
                f"{name} does not take {'sparse' if sparse else 'dense'} gradients ({line})",
                "use torch.optim.SGD or Adagrad, which take both kinds, or sparse=False in the constructor of the "
                "embedding and torch.optim.Adam",
            ) from None
        raise
    if looks is not None:
        del looks.grad_scale, looks.found_inf
