"""Tensor parallelism: the processes of a group share each layer in a model's plan. FSDP2 may divide the rest again."""

from collections.abc import Mapping

import torch
from torch import distributed as dist
from torch import nn

from ..alone.kept import kept
from ..alone.passes import passes_alone
from ..config import RunConfig
from ..errors import Edit, UsageError
from ..layout import Layout
from ..step.engine import Engine
from ..step.setup import Setup, compile_if_asked
from ..weights.shards import local
from .derive import PACKS, derive
from .grid import Grid
from .sharding import sharded_layers
from .stages import is_absent
from .strategy import Division, Strategy
from .tensor_plan import NUMBER, shipped_plan, what_is_divided
from .tensor_styles import TensorGroup, divide


def check_config(layout: Layout, config: RunConfig) -> None:
    """Refuses a tp_size together with another way to divide the model."""
    if layout.environment.uses("fsdp") or layout.environment.uses("deepspeed"):
        raise UsageError(
            "parallelism_config has a tp_size",
            "use distributed_type: MULTI_GPU in the config file",
            [Edit("distributed_type", "MULTI_GPU")],
            "as in accelerate_configs/fsdp2_tensor_parallel.yaml",
        )


class TensorParallel(Strategy):
    name = "TP"
    axis = "tp"
    takes_fp16 = False
    cause_at_once = (
        "something between two layers of the tp_plan {draws}needs all features, as softmax, norms and means do: leave "
        "these layers out of the tp_plan, or use {fallback}"
    )
    launch_checks = (check_config,)

    def plan(self, setup: Setup) -> Mapping[str, str]:
        model, layout, why = setup.model, setup.plan.layout, "not in the plan"
        # FSDP2, a pipeline and expert parallelism handle only one range of a weight.
        packs = layout.num_processes == layout.tp and layout.ep == 1
        which = f"the tp_plan of {type(model).__name__}"
        plan, why_not = shipped_plan(model, layout.tp, packs)
        if why_not:
            with passes_alone(setup) as forward:
                # A decorator: two passes are compared, so each begins with the same state.
                alike = kept(model, setup.optimizer, [setup.forward_step], setup.accelerator.device)
                plan = derive(model, alike(lambda: forward(model)), layout.tp, PACKS if packs else PACKS[:1])
            if not plan:
                raise UsageError(
                    f"{why_not}, and none can be derived: that needs two linear layers in a row that share no weight "
                    "with others, with no layer between them that needs all features, and that forward_step does not "
                    "differentiate",
                    "use --config_file accelerate_configs/fsdp2.yaml",
                )
            which, why = f"{why_not}: a derived one", "all features are needed"
            if not setup.plan.config.check_steps:
                setup.accelerator.print("--check_steps 0: the parity check does not prove the derived plan")
        setup.accelerator.print(f"{which} {what_is_divided(model, layout.tp, plan, why)}")
        return plan

    def divide(self, model: nn.Module, root: nn.Module, plan: Mapping[str, str], grid: Grid) -> None:
        group, modules = TensorGroup(grid.mesh["tp"]), dict(model.named_modules())
        for name, style in plan.items():
            owner, _, number = name.rpartition(".") if style == NUMBER else (name, "", "")
            if owner in modules and not is_absent(modules[owner]):
                divide(modules[owner], style, group, number)

    def wrap(self, setup: Setup, division: Division) -> Engine:
        model, plan = setup.model, setup.plan
        compile_if_asked(model, plan, sharded_layers(model, plan.layout) if plan.layout.dp_shard > 1 else ())
        division.apply(model)
        # As for evaluation, so that Accelerate adds only mixed precision. For training it would wrap the model in DDP.
        return Engine(setup, setup.accelerator.prepare_model(model, evaluation_mode=True))


def average_whole_weights(engine: Engine, group: dist.ProcessGroup) -> None:
    """Lets the processes of a tensor-parallel group take the same update of the weights that each of them holds. Each
    computes their gradients by itself, and GPU kernels add in no fixed order: without this they drift apart."""
    ranks, tensors = {*dist.get_process_group_ranks(group)}, engine.saved_tensors()
    held = [keys for holders, keys in engine.replicas.shared.items() if ranks <= {*holders}]
    weights = [tensors[name] for keys in held for name, _ in keys]

    def average() -> None:
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            like = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in like])
            dist.all_reduce(flat, group=group)
            means = (flat / len(ranks)).split([gradient.numel() for gradient in like])
            torch._foreach_copy_(like, [mean.view_as(gradient) for mean, gradient in zip(means, like)])

    engine.after_backward.append(average)
