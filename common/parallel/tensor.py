"""Tensor parallelism: the processes of a group share each layer in a model's plan. FSDP2 may divide the rest again."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..config import RunConfig
from ..environment import Environment
from ..errors import Edit, UsageError
from ..layout import Layout
from ..plan import Plan
from ..step.engine import Engine
from ..step.setup import Setup, choose_fused_kernels, compile_if_asked, exchange_weights
from ..weights.on_disk import materialized
from .derive import derived_plan
from .fsdp2 import average_scalars, mixed_precision_policy, scalars_of, sharded_layers
from .strategy import Strategy, Symptoms, rehearse_on_gloo
from .tensor_plan import check_plan, divide_numbers, has_plan, what_is_divided


def check_config(layout: Layout, config: RunConfig) -> None:
    """A tp_size beside another way to divide the model, or with fp16."""
    if layout.environment.uses("fsdp") or layout.environment.uses("deepspeed"):
        raise UsageError(
            "parallelism_config has a tp_size",
            "use distributed_type: MULTI_GPU in the config file",
            [Edit("distributed_type", "MULTI_GPU")],
            "as in accelerate_configs/fsdp2_tensor_parallel.yaml",
        )
    if layout.precision == "fp16":
        raise UsageError(
            "fp16 does not work with tensor parallelism",
            "use --mixed_precision bf16 after accelerate launch",
            [Edit("mixed_precision", "bf16")],
        )


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Layers that cannot be divided, of a model that says how."""
    if has_plan(model):
        check_plan(model, plan.layout.tp, plan.layout.data_parallel_size == 1)


class TensorParallel(Strategy):
    name = "TP"
    launch_checks = (check_config,)
    model_checks = (check_layers,)

    def is_requested(self, environment: Environment, config: RunConfig) -> bool:
        return environment.mesh_size("tp") > 1

    def sizes(self, environment: Environment, config: RunConfig) -> dict[str, Any]:
        return {"tp": environment.mesh_size("tp")}

    def title(self, layout: Layout) -> str:
        replicas = f"{layout.dp_replicate} × " if layout.dp_replicate > 1 else ""
        shards = f"FSDP2 {layout.dp_shard} × " if layout.dp_shard > 1 else ""
        return f"{replicas}{shards}TP {layout.tp}"

    def rehearse(self, layout: Layout, timeout: timedelta) -> None:
        rehearse_on_gloo(timeout)

    def with_plan(self, setup: Setup) -> Setup:
        model, size, whole = setup.model, setup.plan.layout.tp, None
        if has_plan(model):
            plan = check_plan(model, size, setup.plan.layout.data_parallel_size == 1)
        else:
            plan, whole = derived_plan(setup)
            if not setup.plan.config.check_steps:
                setup.accelerator.print("--check_steps 0: the parity check does not prove the derived plan")
        setup.accelerator.print(what_is_divided(model, size, plan, whole))
        return replace(setup, tp_plan=plan)

    def wrap(self, setup: Setup) -> Engine:
        accelerator, model, inner, plan = setup.accelerator, setup.model, setup.optimizer, setup.plan
        compile_if_asked(model, plan, sharded_layers(model, plan.layout) if plan.layout.dp_shard > 1 else ())
        parallelize(accelerator, model, inner, plan.layout, setup.tp_plan)
        # As for evaluation, so that Accelerate adds mixed precision alone. For training it would ask the model for its
        # number of processes, and find the optimizer's weights by their addresses, which shards without elements lack.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare_optimizer(inner)
        choose_fused_kernels(accelerator, inner)
        return Engine(setup, model, optimizer)

    def likely_cause(self, seen: Symptoms) -> str | None:
        if not seen.at_once:
            return None
        return (
            f"something between two layers of the tp_plan {'draws random numbers, or ' * seen.draws}needs all "
            f"features, as softmax, norms and means do: leave these layers out of the tp_plan, or use {self.fallback}"
        )


def parallelize(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    plan: Mapping[str, str] | None = None,
) -> None:
    """Shards the layers in a plan, by default the model's `tp_plan`, and gives the optimizer the sharded parameters.

    The plan is an attribute of the model in the format of transformers, {pattern: style}: a pattern
    is the name of a module in which `*` stands for a number, a style is one of `STYLES`. Other
    layers stay whole in each process. If the config also has data parallelism, FSDP2 (or HSDP) then
    shards everything again. Not through Accelerate: its version 1.15 needs a class for that which
    transformers 5 no longer has.

    Raises:
        UsageError: no plan, a plan that does not fit the model, or sizes that are not divisible.
    """
    from torch.distributed.tensor.parallel import parallelize_module  # the import takes 0.7 s

    from .tensor_styles import parallel_style

    mesh = accelerator.torch_device_mesh
    before = dict(model.named_parameters())
    plan = divide_numbers(model, check_plan(model, layout.tp, packs=False) if plan is None else plan, layout.tp)
    data_parallel = tuple(accelerator.parallelism_config.dp_dim_names)
    with materialized(model, accelerator.device):
        parallelize_module(model, mesh["tp"], {name: parallel_style(style) for name, style in plan.items()})
        if data_parallel:
            from torch.distributed.fsdp import fully_shard

            policy, ignored = mixed_precision_policy(layout.precision), set(scalars_of(model))
            for module in (*sharded_layers(model, layout), model):
                fully_shard(module, mesh=mesh[data_parallel], mp_policy=policy, ignored_params=ignored)
    if data_parallel:
        average_scalars(model, accelerator.device)
    else:
        model.to(accelerator.device)  # Accelerate does not move a model that holds DTensors; FSDP2 has
    after = dict(model.named_parameters())
    exchange_weights(optimizer, {weight: after[name] for name, weight in before.items()})


TENSOR = TensorParallel()
