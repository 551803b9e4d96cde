"""Tensor parallelism: which layers are divided, checked and applied to any module."""

import difflib
import re
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from common.errors import UsageError

# Styles as transformers' `tp_plan` has them. Of a linear layer, colwise divides the outputs among the processes and
# rowwise the inputs; in this order the pair needs one sum over the processes. The suffixes say that what comes in or
# goes out is whole.
STYLES = ("colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep", "embedding_rowwise")


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Processes that divide each layer among them."""
    config = accelerator.parallelism_config
    return config.tp_size if config is not None else 1


def parallelize(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Divides the layers of a model that its `tp_plan` names, and the parameters of its optimizer with them.

    The plan is an attribute of the model in the format of transformers, {pattern: style}: a pattern
    is the name of a module in which `*` stands for a number, a style is one of `STYLES`. What it
    does not name stays whole in each process. Where the config also has data parallelism, FSDP2 (or
    HSDP) then divides everything again. Not by Accelerate, whose version 1.15 does so with a class
    that transformers 5 no longer has.

    Raises:
        UsageError: no plan, one that does not fit the model, or sizes that do not divide.
    """
    # Here, because the imports take 0.7 s.
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import Replicate

    whole = Replicate()
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=whole),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=whole),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=whole),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=whole),
    }
    size, mesh = tensor_parallel_size(accelerator), accelerator.torch_device_mesh
    names = {id(weight): name for name, weight in model.named_parameters()}
    plan = check_plan(model, size)
    parallelize_module(model, mesh["tp"], {name: styles[style]() for name, style in plan.items()})
    if data_parallel := tuple(accelerator.parallelism_config.dp_dim_names):
        from torch.distributed.fsdp import fully_shard

        for module in (*sharded_layers(model), model):
            fully_shard(module, mesh=mesh[data_parallel])
    weights = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [weights[names[id(weight)]] for weight in group["params"]]


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that FSDP gathers one at a time: those of the classes in `_no_split_modules`."""
    names = getattr(model, "_no_split_modules", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]


def check_plan(model: nn.Module, size: int) -> dict[str, str]:
    """{name of a module: style} of all modules that the model's plan names.

    Args:
        model: with a `tp_plan`.
        size: processes that divide a layer.

    Raises:
        UsageError: no plan, one that does not fit the model, or sizes that do not divide.
    """
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise UsageError(
            f"{type(model).__name__} has no tp_plan, which says how tensor parallelism divides it: type --config_file "
            "accelerate_configs/fsdp2.yaml, or give the model one as in recipes/mnist.py"
        )
    _check_heads(model, size)
    modules = dict(model.named_modules())
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, []).append(name)
    resolved = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UsageError(f"tp_plan: {pattern}: {style}: expected one of {', '.join(STYLES)}")
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matches = [name for name in modules if expression.fullmatch(name)]
        if not matches:
            near = difflib.get_close_matches(pattern, modules, n=1, cutoff=0)
            raise UsageError(f"tp_plan: {pattern} names no module of {type(model).__name__}: did you mean {near[0]}?")
        for name in matches:
            shared = {owner for weight in modules[name].parameters(recurse=False) for owner in owners[weight]} - {name}
            if shared and _is_transformers(model):
                continue  # its plan is for untied weights, too; what is tied stays whole
            if shared:
                raise UsageError(f"tp_plan: {name} shares its weight with {min(shared)}: leave both out, or untie them")
            _check_width(name, modules[name], style, size)
            resolved[name] = style
    return resolved


def _is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model_prefix")


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if heads and heads % size:
            raise UsageError(
                f"{what} is {heads}, which {size} processes cannot divide: type a multiple of {size}, or another "
                "tp_size in the config file"
            )


def _check_width(name: str, module: nn.Module, style: str, size: int) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise UsageError(f"tp_plan: {name} is {type(module).__name__}: expected Linear or Embedding")
    out_features, in_features = module.weight.shape
    width = in_features if style.startswith("rowwise") else out_features
    if width % size:
        raise UsageError(
            f"tp_plan: {name} is {width} wide, which {size} processes cannot divide: choose a multiple of {size}, or "
            "another tp_size in the config file"
        )
