"""FSDP2: divides each weight among processes, and gathers a layer at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from ..config import RunConfig
from ..environment import is_true, mesh_size, world_size
from ..errors import UsageError
from ..layout import Layout
from ..plan import Plan
from .checks import check_divisible_weights
from .engine import Engine
from .kind import Kind, rehearse_on_gloo
from .on_disk import filled
from .parts import is_divided
from .setup import Setup, choose_fused_kernels, compile_if_asked, float32_outputs, say_what_is_cast

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def check_version(layout: Layout, config: RunConfig) -> None:
    """FSDP1, or weights to move from a GPU that is not there."""
    if not is_true("ACCELERATE_USE_FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UsageError(
            "the config file asks for FSDP1, which is Accelerate's default: type fsdp_version: 2 there, or accelerate "
            "to-fsdp2 --config_file FILE --output_file fsdp2.yaml"
        )
    if is_true("FSDP_OFFLOAD_PARAMS") and layout.device == "cpu":
        raise UsageError("fsdp_offload_params: true in the config file needs a GPU: type false there to rehearse")


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Weights that FSDP2 cannot divide, or would silently cast."""
    check_divisible_weights(model, Fsdp2.name, casts=plan.layout.precision != "float32")


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Layers that FSDP2 cannot gather."""
    if plan.layout.tensor == 1:
        wrapped_classes(model)


class Fsdp2(Kind):
    name = "FSDP2"
    distributed_type = DistributedType.FSDP
    needs_all_weights = True  # it waits for the gradient of each
    launch_checks = (check_version,)
    model_checks = (check_weights, check_layers)

    def is_asked(self, config: RunConfig) -> bool:
        return is_true("ACCELERATE_USE_FSDP") or (mesh_size("tp") > 1 and mesh_size("dp_shard") > 1)

    def sizes(self, config: RunConfig) -> dict[str, Any]:
        replicas = mesh_size("dp_replicate")
        shards = mesh_size("dp_shard") if mesh_size("tp") > 1 else world_size() // replicas
        return {"replicas": replicas, "shards": shards}

    def title(self, layout: Layout) -> str:
        return f"HSDP {layout.replicas} × {layout.shards}" if layout.replicas > 1 else self.name

    def rehearse(self, timeout: timedelta) -> None:
        rehearse_on_gloo(timeout)

    def wrap(self, setup: Setup) -> Engine:
        accelerator, model, plan = setup.accelerator, setup.model, setup.plan
        for end in ("input", "output"):
            if embedding_of(model, end) is None:  # Accelerate asks models of transformers, and some raise an error
                setattr(model, f"get_{end}_embeddings", lambda: None)
        classes = wrapped_classes(model)
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = classes
        accelerator.state.fsdp_plugin.mixed_precision_policy = mixed_precision_policy(plan.layout.precision)
        if not classes:
            accelerator.print(
                f"{type(model).__name__} names no layers in _no_split_modules: FSDP gathers the whole model at once, "
                "which saves less memory"
            )
        if plan.layout.precision != "float32":
            say_what_is_cast(accelerator, model, self.name)
            model.register_forward_hook(float32_outputs)  # Accelerate's autocast under DDP casts; FSDP2 does not
        compile_if_asked(model, plan, sharded_layers(model))
        offloads = is_true("FSDP_OFFLOAD_PARAMS")
        # Weights that another kind has divided stay as they are.
        divided = [module for module in model.modules() if any(map(is_divided, module.parameters(recurse=False)))]
        accelerator.state.fsdp_plugin.ignored_modules = divided or None
        with filled(model, "cpu" if offloads else accelerator.device), _found_by_name(model, setup.optimizer):
            model, optimizer = accelerator.prepare(model, setup.optimizer)
        choose_fused_kernels(accelerator, setup.optimizer)
        return Engine(setup, model, optimizer)


@contextmanager
def _found_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives the optimizer the weights that replace its own in the `with` block. Accelerate finds them by their
    addresses, and weights that are still on disk have none."""
    names = {weight: name for name, weight in model.state_dict(keep_vars=True).items()}
    groups = [[names[weight] for weight in group["params"]] for group in optimizer.param_groups]
    yield
    weights = model.state_dict(keep_vars=True)
    for group, own in zip(optimizer.param_groups, groups):
        group["params"] = [weights[name] for name in own]


def mixed_precision_policy(precision: str) -> "MixedPrecisionPolicy":
    """What FSDP2 casts: it gathers weights in 16 bits and sums gradients in float32, as torchtitan does by default.
    Accelerate's default is to sum them in 16 bits; then the result depends more on the number of processes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision == "float32":
        return MixedPrecisionPolicy()
    gathered = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that FSDP gathers one at a time: their classes are in `_no_split_modules`. A layer comes after those
    inside it, as torch's `fully_shard` needs."""
    names = getattr(model, "_no_split_modules", None) or []
    return [module for module in model.modules() if type(module).__name__ in names][::-1]


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


FSDP2 = Fsdp2()
