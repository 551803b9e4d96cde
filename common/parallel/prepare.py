"""Wraps model and optimizer for the run's layout, and chooses what takes the steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.batches import ForwardStep
from ..environment import is_true
from ..layout import Kind
from ..plan import Plan
from . import deepspeed, fsdp
from .accelerate_engine import AccelerateEngine
from .batch_loss import BatchLoss, BatchLossFn
from .checks import casts_weights
from .engine import Engine
from .guards import checked
from .on_disk import fill, filled
from .parts import is_divided, local
from .pipeline import Pipeline, PipelineEngine
from .sequence import SequenceGroup, divider_of
from .tensor_parallel import parallelize

FUSED_ADAM = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Setup:
    """What takes the steps of a run, before `prepare`.

    Attributes:
        accelerator: from `start(config)`.
        model: the recipe's module.
        optimizer: over its weights.
        forward_step: as for `fit`.
        plan: of the run.
        batch_loss: as for `fit`.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward_step: ForwardStep
    plan: Plan
    batch_loss: BatchLossFn | None = None

    def checked_functions(self) -> tuple[ForwardStep, BatchLoss | None]:
        """(forward_step, batch_loss), which raise UsageError for wrong results."""
        forward_step = checked(self.forward_step, self.plan.micro_batch_size, self.batch_loss is not None)
        if self.batch_loss is None:
            return forward_step, None
        return forward_step, BatchLoss(self.batch_loss, self.plan, self.accelerator.device)


def prepare(setup: Setup) -> Engine:
    """Wraps model and optimizer for the run's layout. `check_trainable` has accepted them."""
    accelerator, plan = setup.accelerator, setup.plan
    by_kind = {Kind.PIPELINE: _pipeline, Kind.DEEPSPEED: _deepspeed, Kind.FSDP2: _fsdp2, Kind.TENSOR: _tensor}
    wrap = by_kind.get(plan.layout.kind, _whole)
    if plan.layout.sequence > 1:
        divider_of(setup.model, plan.layout.sequence).divide(SequenceGroup(plan.layout, accelerator.device))
    read = {name: weight.nbytes for name, weight in setup.model.named_parameters() if weight.is_meta}
    wrapped, model, optimizer = wrap(accelerator, setup.model, setup.optimizer, plan)
    forward_step, batch_loss = setup.checked_functions()
    engine = wrapped(accelerator, model, optimizer, forward_step, plan, batch_loss)
    own = sum(local(weight).nbytes for name, weight in engine.module.named_parameters() if name in read)
    if own < sum(read.values()) and plan.layout.kind != Kind.DEEPSPEED:
        accelerator.print(f"{sum(read.values()) / 1e9:.2g} GB of weights, of which process 0 reads {own / 1e9:.2g} GB")
    return engine


Wrapped = tuple[type[Engine], nn.Module, Any]  # the class that takes the steps, the model, the optimizer


def _whole(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Wrapped:
    """One process, or DDP."""
    fill(model)
    _compile_if_asked(model, plan)
    _let_ddp_send_state_alone(model)
    model, prepared = accelerator.prepare(model, optimizer)
    choose_fused_kernels(accelerator, optimizer)
    return AccelerateEngine, model, prepared


def _fsdp2(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Wrapped:
    for end in ("input", "output"):
        if fsdp.embedding_of(model, end) is None:  # Accelerate asks models of transformers, and some raise an error
            setattr(model, f"get_{end}_embeddings", lambda: None)
    classes = fsdp.wrapped_classes(model)
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = classes
    accelerator.state.fsdp_plugin.mixed_precision_policy = fsdp.mixed_precision_policy(plan.layout.precision)
    if not classes:
        accelerator.print(
            f"{type(model).__name__} names no layers in _no_split_modules: FSDP gathers the whole model at once, "
            "which saves less memory"
        )
    if casts_weights(plan):
        _say_what_is_cast(accelerator, model, plan)
        model.register_forward_hook(_float32_outputs)  # Accelerate's autocast under DDP casts them; FSDP2 does not
    _compile_if_asked(model, plan)
    offloads = is_true("FSDP_OFFLOAD_PARAMS")
    with filled(model, "cpu" if offloads else accelerator.device), _found_by_name(model, optimizer):
        model, prepared = accelerator.prepare(model, optimizer)
    choose_fused_kernels(accelerator, optimizer)
    return AccelerateEngine, model, prepared


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


def _deepspeed(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Wrapped:
    fill(model)
    deepspeed.configure(accelerator, model, optimizer, plan)
    _say_what_is_cast(accelerator, model, plan)
    if plan.layout.precision != "float32":
        model.register_forward_pre_hook(_bf16_inputs, with_kwargs=True)
        model.register_forward_hook(_float32_outputs)
    _compile_if_asked(model, plan)
    model, prepared = accelerator.prepare(model, optimizer)
    deepspeed.load_models_whole()
    return deepspeed.DeepSpeedEngine, model, prepared


def _pipeline(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Wrapped:
    pipeline = Pipeline(accelerator, model, optimizer, plan)
    _compile_if_asked(pipeline.stage, plan)
    prepared = accelerator.prepare_optimizer(optimizer)
    choose_fused_kernels(accelerator, optimizer)
    return PipelineEngine, pipeline, prepared


def _tensor(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Wrapped:
    """Tensor parallelism. Accelerate reads its size from the model: from its attribute `tp_size`, or from the config of
    a transformers model, where that attribute cannot be set."""
    _compile_if_asked(model, plan)
    parallelize(accelerator, model, optimizer, plan.layout)
    size, config = plan.layout.tensor, getattr(model, "config", None)
    before = getattr(config, "distributed_config", ...)
    if config is None:
        model.tp_size = size  # type: ignore[assignment]  # torch's annotation is too narrow
    else:
        config.distributed_config = {"tp_size": size}
    weights = [group["params"] for group in optimizer.param_groups]
    model, prepared = accelerator.prepare(model, optimizer)
    # Accelerate finds the optimizer's weights by their addresses, and shards without elements have none.
    for group, own in zip(optimizer.param_groups, weights):
        group["params"] = own
    if config is not None:  # it must not be exported
        if before is ...:
            del config.distributed_config
        else:
            config.distributed_config = before
    choose_fused_kernels(accelerator, optimizer)
    return AccelerateEngine, model, prepared


def _let_ddp_send_state_alone(model: nn.Module) -> None:
    """DDP sends the first process's buffers before each forward pass, for example BatchNorm's. A buffer that no
    checkpoint holds is no state, but a constant, for example a table of positions: each process has computed it."""
    constants = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)


def choose_fused_kernels(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer of torch update all weights in one kernel. Leaves the choice of the recipe, if it made one."""
    weights = [local(weight) for group in optimizer.param_groups for weight in group["params"]]
    chosen = any(optimizer.defaults.get(name) is not None for name in ("fused", "foreach"))
    chosen = chosen or any(optimizer.defaults.get(name) for name in ("capturable", "differentiable"))
    # A fused kernel hides the steps that loss scaling skips, and ignores the strides of a weight with gaps.
    if (
        not chosen
        and accelerator.scaler is None
        and _has_fused_kernel(optimizer)
        and all(weight.is_floating_point() and _is_dense(weight) for weight in weights)
    ):
        optimizer.defaults["fused"] = True
        for group in optimizer.param_groups:
            group["fused"] = True


def _has_fused_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch 2.13 has a kernel that gives the same result. That of SGD fails on DTensors, and with momentum if
    a weight gets its first gradient later than others."""
    if type(optimizer) in FUSED_ADAM:
        return True
    groups = optimizer.param_groups
    plain = not any(group.get("momentum") or any(map(is_divided, group["params"])) for group in groups)
    return type(optimizer) is torch.optim.SGD and plain


def _is_dense(weight: Tensor) -> bool:
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


def _compile_if_asked(model: nn.Module, plan: Plan) -> None:
    """Compiles in place, to keep the names of the weights. If FSDP gathers weights layer by layer, compiles each layer
    separately, as torchtitan does: gathering cannot be part of a graph."""
    if not plan.config.compile:
        return
    for module in (plan.layout.fsdp_shards and fsdp.sharded_layers(model)) or [model]:
        # Not module.compile(): it silently skips torch's own modules, for example Sequential.
        module.forward = torch.compile(module.forward)


def _say_what_is_cast(accelerator: Accelerator, model: nn.Module, plan: Plan) -> None:
    others = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()} - {"float32"})
    if others:
        accelerator.print(f"{plan.layout.kind} trains and exports this model's {', '.join(others)} weights in float32")


def _float32_outputs(module: nn.Module, args: tuple, output: Any) -> Any:
    return _cast(output, torch.float32)


def _bf16_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """DeepSpeed casts no inputs in bf16."""
    return _cast(args, torch.bfloat16), _cast(kwargs, torch.bfloat16)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
