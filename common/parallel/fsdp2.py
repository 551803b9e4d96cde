"""FSDP2: divides each weight among processes, and gathers a layer at a time."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

from ..config import RunConfig
from ..errors import Edit, UsageError
from ..layout import Layout
from ..plan import Plan
from ..step.engine import Engine
from ..step.setup import Setup, compile_if_asked, float32_outputs, say_what_is_cast
from ..weights.shards import is_divided
from . import sharding
from .grid import Grid
from .strategy import Division, Strategy


def check_version(layout: Layout, config: RunConfig) -> None:
    """Refuses FSDP1, or offloading without a GPU."""
    environment = layout.environment
    if not environment.uses("fsdp"):
        return
    if environment.settings.get("FSDP_VERSION", "1") != "2":
        raise UsageError(
            "the config file asks for FSDP1, which is Accelerate's default",
            "use fsdp_version: 2 there",
            [Edit("fsdp_version", 2, "fsdp_config")],
            "or accelerate to-fsdp2 --config_file FILE --output_file fsdp2.yaml",
        )
    if sharding.offloads(layout) and layout.device == "cpu":
        raise UsageError("fsdp_offload_params: true in the config file needs a GPU", "use false there to rehearse")


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a weight that FSDP2 would hold in a different kind of memory from the others."""
    for name, weight in model.named_parameters() if plan.layout.precision != "float32" else ():
        if weight.is_complex():
            raise UsageError(f"{name} is complex, and FSDP2 would cast it to 16 bits: use --mixed_precision no")
    scalar = next((name for name, weight in model.named_parameters() if weight.ndim == 0), None)
    if scalar is not None and sharding.offloads(plan.layout):
        raise UsageError(
            f"{scalar} has no dimension to shard, so FSDP2 keeps it whole; that does not work with fsdp_offload_params",
            "use false there in the config file, or give it the shape (1,)",
        )


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a class of layers that the config file names, but the model does not have."""
    present = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in sharding.classes_in_the_file(plan.layout) if name not in present]:
        raise UsageError(
            f"fsdp_transformer_layer_cls_to_wrap names {missing[0]}, but the model's layers are "
            f"{', '.join(sorted(present))}",
            "remove the key",
            [Edit("fsdp_transformer_layer_cls_to_wrap", section="fsdp_config")],
            "then FSDP uses the model's _no_split_modules",
        )


class Fsdp2(Strategy):
    name = "FSDP2"
    distributed_type = DistributedType.FSDP
    needs_all_weights = True  # it waits for the gradient of each weight
    frees_weights = True
    launch_checks = (check_version,)
    model_checks = (check_weights, check_layers)

    def is_requested(self, layout: Layout) -> bool:
        # With tensor parallelism, it also sums the gradients of processes that share the tokens of a sample.
        is_sharded = layout.environment.uses("fsdp") or layout.environment.mesh_size("dp_shard") > 1
        return is_sharded or (layout.tp > 1 and layout.sp > 1)

    def title(self, layout: Layout) -> str:
        if layout.dp_replicate > 1:
            return f"HSDP {layout.dp_replicate} × {layout.dp_shard}"
        shards = layout.dp_shard // layout.sp
        return f"{self.name} {shards}" if layout.tp * layout.pp > 1 and shards > 1 else self.name

    def rehearse(self, layout: Layout, timeout: timedelta) -> None:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState(backend="gloo", timeout=timeout).distributed_type = DistributedType.MULTI_GPU  # as on GPUs

    def after_start(self) -> None:
        # Otherwise transformers loads weights only in the first process. Here each process reads its shards from disk.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"

    def divide(self, model: nn.Module, root: nn.Module, plan: Any, grid: Grid) -> None:
        layout = grid.layout
        # FSDP2 leaves out scalars, and weights that expert parallelism has divided.
        axes = {each: each.device_mesh.mesh_dim_names if is_divided(each) else () for each in model.parameters()}
        others = {weight for weight, names in axes.items() if weight.ndim == 0 or "experts" in (names or ())}
        options: dict[str, Any] = {
            "mesh": grid.shards,
            "mp_policy": mixed_precision_policy(layout.precision),
            "offload_policy": fsdp.CPUOffloadPolicy() if sharding.offloads(layout) else fsdp.OffloadPolicy(),
            "reshard_after_forward": None if layout.environment.gathers_again else False,
            "ignored_params": others,
        }
        layers = sharding.sharded_layers(model, layout)
        embedding, head = sharding.ends_of(model, layers) if root is model else ([], [])  # a stage has one of them
        for modules in filter(None, [*([layer] for layer in layers), embedding]):
            fsdp.fully_shard(modules, **options)
        if head:  # the backward pass begins with it, before it would be gathered again
            fsdp.fully_shard(head, **options | {"reshard_after_forward": False})
        fsdp.fully_shard(root, **options)  # the module that runs: it gathers the rest
        # For `generate`: all processes take as many passes as the longest answer needs.
        model._is_fsdp_managed_module = True  # type: ignore[assignment]
        if hasattr(model, "generate"):
            fsdp.register_fsdp_forward_method(model, "generate")  # it calls an encoder without the model around it
        for module in root.modules():
            if isinstance(module, fsdp.FSDPModule):  # only these: FSDP2 has changed their classes
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_reshard_after_backward(root is not model, recurse=False)  # the engine decides
        sum_scalars(model, grid.shards.get_all_groups())

    def wrap(self, setup: Setup, division: Division) -> Engine:
        accelerator, model, plan = setup.accelerator, setup.model, setup.plan
        layers = sharding.sharded_layers(model, plan.layout)
        _say_what_is_gathered_at_once(setup, layers)
        if plan.layout.precision != "float32":
            say_what_is_cast(accelerator, model, self.name)
            with torch._C.DisableTorchFunctionSubclass():  # weights on the disk stay there
                for weight in model.parameters():
                    if weight.requires_grad:  # the optimizer updates it
                        weight.data = weight.data.float()
            model.register_forward_hook(float32_outputs)  # Accelerate's autocast under DDP casts; FSDP2 does not
        compile_if_asked(model, plan, layers)
        _checkpoint_activations(layers, plan.layout)
        division.apply(model)
        return Engine(setup, model)


def _checkpoint_activations(layers: Sequence[nn.Module], layout: Layout) -> None:
    """Makes layers recompute their activations in the backward pass, as the config file says."""
    if not layout.environment.is_true("fsdp_activation_checkpointing"):
        return
    to_cpu = layout.environment.is_true("fsdp_activation_checkpointing_offload")

    def checkpointed(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with save_on_cpu(pin_memory=layout.device != "cpu") if to_cpu else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **named)

    for layer in layers:
        layer.forward = partial(checkpointed, layer.forward)


def mixed_precision_policy(precision: str) -> fsdp.MixedPrecisionPolicy:
    """The casts of FSDP2: it gathers weights in 16 bits and sums gradients in float32, as torchtitan does by default.
    Accelerate's default is to sum them in 16 bits; then the result depends more on the number of processes."""
    gathered = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return fsdp.MixedPrecisionPolicy(gathered, torch.float32 if gathered else None)


def sum_scalars(model: nn.Module, groups: Sequence[Any]) -> None:
    """Makes processes sum the gradients of weights without dimensions, such as CLIP's temperature, as FSDP2 does for
    other weights: each process holds these whole. `groups`: of the processes, along each dimension of their mesh."""

    def total(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()  # autograd may need it elsewhere
        for group in groups:
            dist.all_reduce(gradient, group=group)
        return gradient

    for weight in model.parameters():
        if weight.ndim == 0 and weight.requires_grad:
            weight.register_hook(total)


def _say_what_is_gathered_at_once(setup: Setup, layers: Sequence[nn.Module]) -> None:
    """Prints a line if FSDP gathers layers with the rest of the model, or all of it, or ignores a key of the file."""
    accelerator, model, layout = setup.accelerator, setup.model, setup.plan.layout
    settings = layout.environment.settings
    for key in sharding.without_effect(settings.get("FSDP_AUTO_WRAP_POLICY"), settings.get("FSDP_MIN_NUM_PARAMS")):
        accelerator.print(f"{key} has no effect: {sharding.BY_CLASSES}")
    classes, kept = ({type(each).__name__ for each in part} for part in (model.modules(), layers))
    if left := sorted(classes & (sharding.named_classes(model, layout) - kept)):
        accelerator.print(
            f"a {left[0]} shares a weight with a module outside it: FSDP gathers each {', '.join(left)} with the rest "
            "of the model at once, which saves less memory"
        )
    elif not layers:
        accelerator.print(
            f"{type(model).__name__} names no layers in _no_split_modules: FSDP gathers the whole model at once, which "
            "saves less memory"
        )
