"""Tensor parallelism: the processes of a group share each layer in a model's plan. FSDP2 may divide the rest again."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..errors import Edit, UsageError
from ..layout import Layout
from ..plan import Plan
from ..step.engine import Engine
from ..step.setup import Setup, compile_if_asked
from .derive import derived_plan
from .grid import Division, Grid, Part
from .sharding import sharded_layers
from .stages import is_absent
from .strategy import Strategy
from .tensor_plan import can_pack, check_plan, divide_numbers, has_plan, what_is_divided


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
        check_plan(model, plan.layout.tp, can_pack(plan.layout))


class TensorParallel(Strategy):
    name = "TP"
    axis = "tp"
    cause_at_once = (
        "something between two layers of the tp_plan {draws}needs all features, as softmax, norms and means do: leave "
        "these layers out of the tp_plan, or use {fallback}"
    )
    launch_checks = (check_config,)
    model_checks = (check_layers,)

    def plan(self, setup: Setup) -> Mapping[str, str]:
        model, size, whole = setup.model, setup.plan.layout.tp, None
        if has_plan(model):
            plan = check_plan(model, size, can_pack(setup.plan.layout))
        else:
            plan, whole = derived_plan(setup)
            if not setup.plan.config.check_steps:
                setup.accelerator.print("--check_steps 0: the parity check does not prove the derived plan")
        setup.accelerator.print(what_is_divided(model, size, plan, whole))
        return plan

    def divide(self, part: Part, plan: Mapping[str, str], grid: Grid) -> None:
        parallelize(part.model, plan, grid.mesh["tp"])

    def wrap(self, setup: Setup, division: Division) -> Engine:
        model, plan = setup.model, setup.plan
        compile_if_asked(model, plan, sharded_layers(model, plan.layout) if plan.layout.dp_shard > 1 else ())
        division.apply(Part(model, model))
        # As for evaluation, so that Accelerate adds mixed precision alone. For training it would wrap the model in DDP.
        return Engine(setup, setup.accelerator.prepare_model(model, evaluation_mode=True))


def parallelize(model: nn.Module, plan: Mapping[str, str], mesh: Any) -> None:
    """Divides layers of a model; the others stay whole in each process.

    Args:
        model: all of it, or a stage of a pipeline.
        plan: {module or number: style}, for the whole model.
        mesh: of the processes that share each layer.
    """
    from .tensor_styles import TensorGroup, divide  # the import takes 0.7 s

    group = TensorGroup(mesh)
    present = {name: module for name, module in model.named_modules() if not is_absent(module)}
    for name, style in divide_numbers(present, plan, mesh.size()).items():
        if name in present:
            divide(present[name], style, group)


TENSOR = TensorParallel()
