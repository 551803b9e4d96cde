"""Gives hooks on weights, and code that reads sharded weights, the same values as on one process."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UsageError
from ..layout import Layout
from ..package import is_own
from ..step.engine import Engine
from ..weights.shards import is_divided

Hook = Callable[[Tensor], Tensor | None]


def take_hooks(model: nn.Module, layout: Layout, fallback: str) -> dict[str, list[Hook]]:
    """Removes the hooks of a model's weights, and returns {name: hooks}. Raises UsageError if values would differ."""
    found: dict[str, list[Hook]] = {}
    for name, weight in model.named_parameters():
        with torch._C.DisableTorchFunctionSubclass():  # a weight on the disk stays there
            has_late = bool(weight._post_accumulate_grad_hooks)
            hooks = [] if layout.num_processes == 1 else [*(weight._backward_hooks or {}).values()]
        if has_late and (layout.num_processes > layout.pp or "FSDP2" in layout.strategies):
            what = "after its gradient is accumulated, and a process accumulates only that of its own micro-batches"
        elif hooks and layout.sp * layout.ep > 1:
            what = f"whose gradient {layout} divides by tokens"
        else:
            found |= {name: hooks} if hooks else {}
            continue
        raise UsageError(f"{name} has a hook, {what}: use a hook of the optimizer's step, or {fallback}")
    for name in found:
        model.get_parameter(name)._backward_hooks = None
    return found


def give_hooks(engine: Engine, hooks: Mapping[str, Sequence[Hook]]) -> None:
    """Registers these hooks on the engine's counterparts of the weights."""
    factor, held = engine.plan.layout.num_averaged, engine.saved_tensors() if hooks else {}
    modules = dict(engine.running_modules()) if hooks else {}
    for name, functions in hooks.items():
        if name not in held:  # of another stage
            continue
        owner, _, key = name.rpartition(".")
        sharded = [path for path, module in modules.items() if hasattr(module, "unshard")]  # by FSDP2
        around = [path for path in sharded if f"{owner}.".startswith(f"{path}." * bool(path))]
        if around:  # it computes with a gathered weight, which exists from the first pass on
            register = partial(_register_once, modules[owner], key, held[name], functions, factor)
            modules[max(around, key=len)].register_forward_pre_hook(register)
        else:
            _register(held[name], functions, factor)


def _register_once(module: nn.Module, key: str, sharded: Tensor, hooks: Sequence[Hook], factor: int, *_: Any) -> None:
    weight: Any = module._parameters[key]
    if weight is not sharded and not weight._backward_hooks:
        _register(weight, hooks, factor)


def _register(weight: Tensor, functions: Sequence[Hook], factor: int) -> None:
    if weight.requires_grad:
        for function in functions:
            weight.register_hook(partial(_on_whole, function, factor))


def _on_whole(function: Hook, factor: int, gradient: Any) -> Tensor | None:
    """Calls a hook with a gradient as large as in one process: a wrapper's mean makes it `factor` times larger."""
    seen = gradient.full_tensor() if is_divided(gradient) else gradient
    seen = seen / factor if factor != 1 else seen
    result = function(seen)
    result = (seen if seen._version else None) if result is None and seen is not gradient else result
    if result is None:
        return None
    result = result * factor if factor != 1 else result
    if not is_divided(gradient) or is_divided(result):
        return result
    return distribute_tensor(result, gradient.device_mesh, gradient.placements, src_data_rank=None)


INNER = ("torch.distributed.", "torch._", f"{__package__}.")  # packages of frames between the user's code and a kernel


def refuse_numbers_of_shares() -> None:
    """Makes `float()` and `.item()` of a divided tensor raise an error: torch returns the number of the share."""

    def number(operation: Any, args: Any, kwargs: Any) -> Any:
        if any(not placement.is_replicate() for placement in args[0].placements):
            frame = sys._getframe(1)
            while frame.f_back and frame.f_globals.get("__name__", "").startswith(INNER):
                frame = frame.f_back
            reads = "reads a number, with float() or .item(), from a tensor that is divided among processes"
            if not is_own(frame.f_code.co_filename):
                raise RuntimeError(f"{frame.f_code.co_name} of {frame.f_globals.get('__name__')} {reads}")
            place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno},"
            raise UsageError(f"{place} {reads}: call .full_tensor() first, in all processes")
        return operation(args[0].to_local())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = number
