"""FSDP2: divides each weight among processes, and gathers a layer at a time."""

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch import distributed as dist

from ..config import RunConfig
from ..environment import Environment
from ..errors import Edit, UsageError
from ..layout import Layout
from ..plan import Plan
from ..step.checks import check_dense_gradients, check_divisible_weights
from ..step.engine import Engine
from ..step.setup import (
    Setup,
    choose_fused_kernels,
    compile_if_asked,
    float32_outputs,
    say_what_is_cast,
    split_groups_by_mesh,
)
from ..weights.on_disk import materialized
from ..weights.shards import is_divided
from .grid import Division, Grid, Part
from .sharding import classes_in_the_file, gathers_again, named_classes, places_of, sharded_layers
from .strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def check_version(layout: Layout, config: RunConfig) -> None:
    """FSDP1, or weights to move from a GPU that is not there."""
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
    if environment.is_true("fsdp_offload_params") and layout.device == "cpu":
        raise UsageError("fsdp_offload_params: true in the config file needs a GPU", "use false there to rehearse")


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Weights that FSDP2 cannot divide, or would silently cast, load apart, or hold in two kinds of memory."""
    check_dense_gradients(model, optimizer, Fsdp2.name)
    check_divisible_weights(model, Fsdp2.name, casts=plan.layout.precision != "float32")
    names = {weight: name for name, weight in model.named_parameters(remove_duplicate=False)}
    is_true = plan.layout.environment.is_true
    for key in ("fsdp_offload_params", "fsdp_cpu_ram_efficient_loading"):
        if is_true(key) and (scalars := scalars_of(model)):
            raise UsageError(
                f"{names[scalars[0]]} has no dimension that FSDP2 could shard, and stays whole, which does not work "
                f"with {key}",
                "use false there in the config file, or give it the shape (1,)",
            )
    is_shared = len(names) < len([*model.named_parameters(remove_duplicate=False)])
    if is_true("fsdp_cpu_ram_efficient_loading") and is_shared and not hasattr(model, "tie_weights"):
        raise UsageError(
            f"layers of {type(model).__name__} share a weight, and fsdp_cpu_ram_efficient_loading would give each its "
            "own",
            "use false there in the config file",
        )


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """A class of layers that the config file names and the model lacks."""
    present = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in classes_in_the_file(plan.layout) if name not in present]:
        raise UsageError(
            f"fsdp_transformer_layer_cls_to_wrap names {missing[0]}, but the model's layers are "
            f"{', '.join(sorted(present))}",
            "remove the key",
            [Edit("fsdp_transformer_layer_cls_to_wrap", section="fsdp_config")],
            "then the model's own list counts, _no_split_modules",
        )


class Fsdp2(Strategy):
    name = "FSDP2"
    distributed_type = DistributedType.FSDP
    needs_all_weights = True  # it waits for the gradient of each
    launch_checks = (check_version,)
    model_checks = (check_weights, check_layers)

    def is_requested(self, environment: Environment, config: RunConfig) -> bool:
        size = environment.mesh_size
        # Beside tensor parallelism, it also sums the gradients of those that share the tokens of a sample.
        return environment.uses("fsdp") or size("dp_shard") > 1 or (size("tp") > 1 and size("sp") > 1)

    def sizes(self, environment: Environment, config: RunConfig) -> dict[str, Any]:
        replicas = environment.mesh_size("dp_replicate")
        others = replicas * environment.mesh_size("tp") * config.pipeline_stages
        return {"dp_replicate": replicas, "dp_shard": environment.world_size // others}

    def title(self, layout: Layout) -> str:
        if layout.dp_replicate > 1:
            return f"HSDP {layout.dp_replicate} × {layout.dp_shard}"
        shards = layout.dp_shard // layout.sp
        return f"{self.name} {shards}" if layout.tp * layout.pp > 1 and shards > 1 else self.name

    def rehearse(self, layout: Layout, timeout: timedelta) -> None:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState(backend="gloo", timeout=timeout).distributed_type = DistributedType.MULTI_GPU  # as on GPUs

    def variables(self, layout: Layout) -> dict[str, str]:
        # Accelerate divides sequences under DeepSpeed alone: to it, processes that share the tokens of a sample are
        # data-parallel, too, as each has gradients of its own.
        return {"PARALLELISM_CONFIG_SP_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(layout.dp_shard)}

    def divide(self, part: Part, plan: Any, grid: Grid) -> None:
        from torch.distributed.fsdp import fully_shard  # the import takes a second

        layout, model = grid.layout, part.model
        scalars, experts = scalars_of(model), [weight for weight in model.parameters() if is_of_experts(weight)]
        options: dict[str, Any] = {
            "mesh": grid.shards,
            "mp_policy": mixed_precision_policy(layout.precision),
            "reshard_after_forward": None if gathers_again(layout) else False,
            "ignored_params": {*scalars, *experts},
        }
        for module in (*sharded_layers(model, layout), part.root):  # the root is what runs: it gathers the rest
            fully_shard(module, **options)
        average_scalars(model, grid.shards.get_all_groups())

    def wrap(self, setup: Setup, division: Division) -> Engine:
        accelerator, model, plan = setup.accelerator, setup.model, setup.plan
        division.apply(Part(model, model), reads=False)
        plugin, classes = accelerator.state.fsdp_plugin, wrapped_classes(model, plan.layout)
        plugin.transformer_cls_names_to_wrap = classes
        plugin.mixed_precision_policy = mixed_precision_policy(plan.layout.precision)
        _say_what_is_gathered_at_once(setup, classes)
        if plan.layout.precision != "float32":
            say_what_is_cast(accelerator, model, self.name)
            model.register_forward_hook(float32_outputs)  # Accelerate's autocast under DDP casts; FSDP2 does not
        compile_if_asked(model, plan, sharded_layers(model, plan.layout))
        offloads = plan.layout.environment.is_true("fsdp_offload_params")
        # Weights that another strategy has divided stay as they are, and those without dimensions whole.
        ignored = [weight for weight in model.parameters() if is_divided(weight)] + scalars_of(model)
        plugin.ignored_modules = [nn.ParameterList(ignored)] if ignored else None
        device = torch.device("cpu") if offloads else accelerator.device
        with materialized(model, device), _found_by_name(model, setup.optimizer), _ends_of_accelerate(model, classes):
            model, optimizer = accelerator.prepare(model, setup.optimizer)
        for weight in scalars_of(model):
            weight.data = weight.data.to(accelerator.device)
        average_scalars(model, [None])
        split_groups_by_mesh(setup.optimizer)
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


def scalars_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights without dimensions, such as CLIP's temperature: each process holds them whole."""
    return [weight for weight in model.parameters() if weight.ndim == 0]


def average_scalars(model: nn.Module, groups: Sequence[Any]) -> None:
    """Lets processes average the gradients of the weights without dimensions, as FSDP2 does for the others.

    Args:
        model: with such weights.
        groups: of the processes, along each dimension of their mesh; None: all.
    """

    def mean(gradient: Tensor) -> Tensor:
        for group in groups:
            gradient = gradient / dist.get_world_size(group)  # not in place: autograd may need the gradient elsewhere
            dist.all_reduce(gradient, group=group)
        return gradient

    for weight in scalars_of(model):
        if weight.requires_grad:
            weight.register_hook(mean)


def is_of_experts(weight: Tensor) -> bool:
    """Whether expert parallelism has divided a weight: FSDP2 leaves it."""
    return is_divided(weight) and "experts" in (weight.device_mesh.mesh_dim_names or ())


def wrapped_classes(model: nn.Module, layout: Layout) -> list[str]:
    """The classes of layers that Accelerate lets FSDP gather one at a time: those of `sharded_layers` without the input
    embedding in one of them, which Accelerate shards separately."""
    layers, embedding = sharded_layers(model, layout), embedding_of(model, "input")
    whole = {type(layer).__name__ for layer in layers if any(module is embedding for module in layer.modules())}
    return sorted({type(layer).__name__ for layer in layers} - whole)


def _say_what_is_gathered_at_once(setup: Setup, classes: Container[str]) -> None:
    """Prints a line if FSDP gathers layers with the rest of the model, or all of it."""
    accelerator, model, layout = setup.accelerator, setup.model, setup.plan.layout
    kept = {type(layer).__name__ for layer in sharded_layers(model, layout)}
    if left := sorted({type(module).__name__ for module in model.modules()} & (named_classes(model, layout) - kept)):
        accelerator.print(
            f"a {left[0]} shares a weight with what is outside it: FSDP gathers each {', '.join(left)} with the rest "
            "of the model at once, which saves less memory"
        )
    elif not classes:
        accelerator.print(
            f"{type(model).__name__} names no layers in _no_split_modules: FSDP gathers the whole model at once, which "
            "saves less memory"
        )


def embedding_of(model: nn.Module, end: str) -> nn.Module | None:
    """The embedding at the "input" or "output" of a model of transformers; None if it has none."""
    try:
        return getattr(model, f"get_{end}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


@contextmanager
def _ends_of_accelerate(model: nn.Module, classes: Container[str]) -> Iterator[None]:
    """Decides for the `with` block whether Accelerate shards the last norm and the embeddings at both ends, which it
    asks a model of transformers for, separately. If the rest of the model has shared weights, other than those of two
    tied embeddings, they stay together."""
    ends = {end: embedding_of(model, end) for end in ("input", "output")}
    owners = [{module for module, layer in places if layer is model} for places in places_of(model, classes).values()]
    together = any(len(modules) > 1 and not modules <= {*ends.values()} for modules in owners)
    hidden: dict[str, Any] = {
        f"get_{end}_embeddings": lambda: None  # some models raise an error instead
        for end, embedding in ends.items()
        if together or embedding is None
    }
    if together:
        hidden["base_model_prefix"] = "training"  # which is no module: Accelerate finds no last norm
    before = dict(vars(model))
    vars(model).update(hidden)
    yield
    for name in hidden:
        del vars(model)[name]
    vars(model).update({name: before[name] for name in hidden if name in before})


FSDP2 = Fsdp2()
