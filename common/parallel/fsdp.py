"""FSDP2: which layers it gathers at a time, and what it casts."""

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def mixed_precision_policy(precision: str) -> "MixedPrecisionPolicy":
    """What FSDP2 casts: it gathers weights in 16 bits and sums gradients in float32, as torchtitan does by default.
    Accelerate's default is to sum them in 16 bits; then the result depends more on the number of processes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision == "float32":
        return MixedPrecisionPolicy()
    gathered = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that FSDP gathers one at a time: their classes are in `_no_split_modules`."""
    names = getattr(model, "_no_split_modules", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]


def wrapped_classes(model: nn.Module) -> list[str]:
    """The classes of layers that Accelerate lets FSDP gather one at a time: those that the config file names, else
    those in `_no_split_modules`.

    Leaves out classes with the input embedding in one of their layers: Accelerate shards the embedding separately.

    Raises:
        UsageError: the config file names a class that the model lacks, or FSDP cannot gather a shared weight.
    """
    named = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    _check_named(named, model)
    embedding = embedding_of(model, "input")
    classes = named.split(",") if named else getattr(model, "_no_split_modules", None) or []
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    whole = {type(layer).__name__ for layer in layers if any(module is embedding for module in layer.modules())}
    kept = sorted({type(layer).__name__ for layer in layers} - whole)
    _check_shared_weights(model, [layer for layer in layers if type(layer).__name__ in kept])
    return kept


def _check_named(names: str | None, model: nn.Module) -> None:
    """Raises UsageError if the config file names a class of layers that the model lacks."""
    present = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in names.split(",") if name not in present] if names else []:
        raise UsageError(
            f"fsdp_transformer_layer_cls_to_wrap names {missing[0]}, but the model's layers are "
            f"{', '.join(sorted(present))}: remove the key, then the model's own list counts, _no_split_modules"
        )


def embedding_of(model: nn.Module, end: str) -> nn.Module | None:
    """The embedding at the "input" or "output" of a model of transformers; None if it has none."""
    try:
        return getattr(model, f"get_{end}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


def _check_shared_weights(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raises UsageError if two modules share a weight but FSDP gathers them separately. FSDP gathers each layer, the
    input embedding and the rest of the model separately; a tied output embedding goes with the input embedding."""
    group_of = {module: layer for layer in layers for module in layer.modules()}
    ends = [embedding_of(model, end) for end in ("input", "output")]
    if getattr(ends[0], "weight", None) is not getattr(ends[1], "weight", 0):
        ends = ends[:1]
    group_of |= {module: model for module in ends if module is not None}
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(weight, []).append((path, module))
    for sharing in owners.values():
        if len({group_of.get(module) for _, module in sharing}) > 1:
            raise UsageError(
                f"{sharing[0][0]} and {sharing[-1][0]} share a weight, but FSDP gathers them separately: type "
                "--config_file accelerate_configs/ddp.yaml, or remove layers that share one from _no_split_modules"
            )
