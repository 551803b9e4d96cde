"""All strategies, and how a layout combines them."""

from dataclasses import replace
from typing import Any

import torch

from ..config import RunConfig
from ..cpu_group import CpuGroup
from ..environment import Environment, device_type
from ..errors import UsageError
from ..failure import line_of
from ..layout import Layout
from ..step.engine import Engine
from ..step.refusals import check_optimizer
from ..step.setup import Setup
from .ddp import Ddp
from .deepspeed import DeepSpeed, precision_of, zero_stage
from .expert import ExpertParallel
from .fsdp2 import Fsdp2
from .hooks import give_hooks, refuse_numbers_of_shares, take_hooks
from .operations import watched
from .pipeline import PipelineParallel
from .sequence import SequenceParallel
from .strategy import Division, ModelCheck, Strategy
from .tensor import TensorParallel, average_whole_weights

# In a layout, the first one that can wrap a model wraps it. They divide it in this order: each one
# divides the parts that the ones before it leave.
PIPELINE, DEEPSPEED, TENSOR, FSDP2, DDP = PipelineParallel(), DeepSpeed(), TensorParallel(), Fsdp2(), Ddp()
STRATEGIES: tuple[Strategy, ...] = (PIPELINE, DEEPSPEED, TENSOR, SequenceParallel(), ExpertParallel(), FSDP2, DDP)


def layout_of(environment: Environment, config: RunConfig) -> Layout:
    """The layout that the launcher, the config file and the flags ask for. Starts no process."""
    size = environment.mesh_size
    layout = Layout(
        environment=environment,
        num_processes=environment.world_size,
        rank=environment.rank,
        device=device_type(),
        tp=size("tp"),
        sp=size("sp"),
        pp=config.pipeline_stages,
        ep=config.expert_parallel,
    )
    asked = [strategy for strategy in STRATEGIES if strategy.is_requested(layout)]
    asked += [] if any(strategy.wraps for strategy in asked) else [DDP]
    precision = environment.mixed_precision if environment.mixed_precision != "no" else precision_of(environment)
    main = next(strategy for strategy in asked if strategy.wraps)
    names = tuple(strategy.name for strategy in asked)
    layout = replace(layout, strategies=names, precision=precision, takes_means=main.takes_means)
    if FSDP2 in asked:
        replicas = size("dp_replicate")
        shards = layout.num_processes // (replicas * layout.tp * layout.pp)
        layout = replace(layout, dp_replicate=replicas, dp_shard=shards)
    outside_in = [strategy for strategy in asked[::-1] if strategy.wraps] + [each for each in asked if not each.wraps]
    return replace(layout, title=" × ".join(filter(None, [strategy.title(layout) for strategy in outside_in])))


def strategies_of(layout: Layout) -> list[Strategy]:
    return [strategy for strategy in STRATEGIES if strategy.name in layout.strategies]


def main_strategy(layout: Layout) -> Strategy:
    """The strategy that wraps the model."""
    return next(strategy for strategy in strategies_of(layout) if strategy.wraps)


def divides_weights(layout: Layout) -> bool:
    """Whether a process holds only a part of the weights."""
    return layout.tp * layout.pp * layout.dp_shard > 1 or zero_stage(layout.environment) == 3


def model_checks(layout: Layout) -> list[ModelCheck]:
    """The refusals of a model or optimizer. A run raises the first; `accelerate-recipes doctor` lists all."""
    return [check_optimizer, *(check for strategy in strategies_of(layout) for check in strategy.model_checks)]


def check_trainable(setup: Setup) -> Setup:
    """Returns the setup with the plans of the layout's strategies for this model. Raises UsageError for a model or an
    optimizer that the run's layout cannot train, or whose result would differ from one process."""
    for check in model_checks(setup.plan.layout):
        check(setup.model, setup.optimizer, setup.plan)
    return with_plans(setup)


def with_plans(setup: Setup) -> Setup:
    """A collective: the setup, with the main process's plan of how the layout divides the model. Raises UsageError."""
    layout = setup.plan.layout
    if not (plans := {each.name: each.plan for each in strategies_of(layout) if type(each).plan is not Strategy.plan}):
        return setup
    found: Any = None
    if setup.accelerator.is_main_process:
        try:
            found = {name: plan(setup) for name, plan in plans.items()}
        except UsageError as error:
            found = error
        except Exception as error:  # the run of one process will show whether it also has this error
            what = f"{layout} cannot divide {type(setup.model).__name__}: its first pass, without gradients, fails: "
            found = UsageError(f"{what}{line_of(error)}", f"use {main_strategy(layout).fallback}")
        if setup.accelerator.device.type != "cpu":
            torch.get_device_module(setup.accelerator.device).empty_cache()  # after passes of the whole model
    if isinstance(found := CpuGroup(setup.plan.config.hang_timeout).broadcast(found), UsageError):
        raise found
    return replace(setup, plans=found)


def prepare(setup: Setup) -> Engine:
    """Wraps model and optimizer for the run's layout. `check_trainable` has accepted them."""
    layout = setup.plan.layout
    hooks = take_hooks(setup.model, layout, main_strategy(layout).fallback)
    division = Division(setup, strategies_of(layout))
    engine = main_strategy(layout).wrap(setup, division)
    give_hooks(engine, hooks)
    if layout.tp > 1 and setup.accelerator.device.type != "cpu":  # a CPU gives the same bits
        average_whole_weights(engine, division.grid.mesh["tp"].get_group())
    if layout.tp > 1 or layout.dp_shard > 1:
        refuse_numbers_of_shares()
    if layout.tp * layout.sp > 1 and not setup.plan.config.compile:
        engine.forward_step = watched(engine, setup.plans.get(TENSOR.name, {}))
    return engine
