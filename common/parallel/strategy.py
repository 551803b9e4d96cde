"""The interface of a strategy of parallelism, which is all that the loop uses, and the order in which several divide a
model. Each strategy is a module in this folder, and a line in strategies.py."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from accelerate.utils import DistributedType
from torch import nn

from ..config import RunConfig
from ..layout import Layout
from ..plan import Plan
from ..step.engine import Engine
from ..step.optimizer import exchange_weights
from ..step.setup import Setup
from ..weights.on_disk import materialized
from ..weights.shards import is_divided
from .grid import Grid
from .sharding import offloads

LaunchCheck = Callable[[Layout, RunConfig], None]
ModelCheck = Callable[[nn.Module, torch.optim.Optimizer, Plan], None]


class Strategy:
    """A strategy of parallelism. A layout combines one or several; one of them wraps the model."""

    name: ClassVar[str]  # for the terminal
    axis: ClassVar[str] = ""  # of a layout, if it has one of its own
    wraps: ClassVar[bool] = True  # whether it can wrap the model; the first such strategy of a layout does
    distributed_type: ClassVar[DistributedType | None] = None  # of Accelerate, if it has one for this strategy
    needs_all_weights: ClassVar[bool] = False  # whether each forward pass must use all weights
    takes_means: ClassVar[bool] = False  # whether the model's wrapper averages gradients instead of summing them
    frees_weights: ClassVar[bool] = False  # whether a backward pass frees the weights that it has gathered
    takes_fp16: ClassVar[bool] = True  # whether it knows the loss scaling of fp16
    of_weights: ClassVar[bool] = True  # whether it divides weights, and not only what a pass computes
    # Checks that refuse a launch that cannot work, and a model or optimizer that would not have the same result.
    launch_checks: ClassVar[tuple[LaunchCheck, ...]] = ()
    model_checks: ClassVar[tuple[ModelCheck, ...]] = ()
    fallback: ClassVar[str] = "--config_file accelerate_configs/ddp.yaml"  # for a model that it cannot train
    # How this strategy may make values of `forward_step` differ from one process in the first step, and what to type
    # instead; "" if it cannot. `verdict` in check/ fills it in. Below: where only the weights differ.
    cause_at_once: ClassVar[str] = ""
    cause_in_update: ClassVar[str] = (
        "{optimizer} or a schedule does not get each weight whole, or keeps weights outside param_groups and state; or "
        "a hook finds weights by id(p), and the config replaces them; or forward_step takes gradients itself, as a "
        "penalty does: use {fallback}"
    )

    def is_requested(self, layout: Layout) -> bool:
        """Whether the config file or the flags ask for this strategy. The layout already has the sizes from these."""
        return bool(self.axis) and getattr(layout, self.axis) > 1

    def title(self, layout: Layout) -> str:
        """The name for the terminal; "" if there is nothing to say."""
        return f"{self.name} {getattr(layout, self.axis)}"

    def rehearse(self, layout: Layout, timeout: timedelta) -> None:
        """Makes Accelerate run this strategy on the CPU. By default Accelerate would silently turn FSDP into DDP,
        refuse tensor parallelism, start DeepSpeed on a missing backend, or run each process alone."""
        os.environ["ACCELERATE_USE_CPU"] = "true"

    def after_start(self) -> None:
        """Called when the processes have joined."""

    def plan(self, setup: Setup) -> Any:
        """The facts for `divide` about the whole model, which `model_checks` accepted. Only the main process
        calls it. Raises UsageError if this strategy cannot divide it."""

    def divide(self, model: nn.Module, root: nn.Module, plan: Any, grid: Grid) -> None:
        """Divides in place what this process runs of the model. Its weights may still be on the meta device. `model`:
        the recipe's, with its names; of a pipeline without the weights of other stages; `root`: the module that runs:
        the model, or what runs a stage."""

    def wrap(self, setup: Setup, division: "Division") -> Engine:
        """Divides the model, which `check_trainable` has accepted; wraps it and the optimizer into an engine."""
        raise AssertionError(f"{self.name} wraps no model")


class Division:
    """Divides the model of a setup, in the order of the strategies of its layout; not all of them divide a model."""

    def __init__(self, setup: Setup, strategies: Sequence[Strategy]):
        self.grid = Grid(setup.plan.layout, setup.accelerator.device, setup.plan.config.hang_timeout)
        self._optimizer = setup.optimizer
        self._plans = [(strategy, setup.plans.get(strategy.name)) for strategy in strategies]

    def apply(self, model: nn.Module, root: nn.Module | None = None, weights: bool = True) -> None:
        """Divides a part, reads the weights that are still on disk, moves it to the device, and gives the optimizer its
        weights in place of the whole model's. `root`: as in `Strategy.divide`; None: the same as `model`; `weights`:
        False: the part has none, and its results are divided."""
        root = model if root is None else root
        device, before = self.grid.device, dict(model.named_parameters(remove_duplicate=False))
        with materialized(model, "cpu" if offloads(self.grid.layout) else device):
            for strategy, plan in self._plans if weights else [each for each in self._plans if not each[0].of_weights]:
                strategy.divide(model, root, plan, self.grid)
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_divided(tensor) and tensor.device.type != device.type:
                tensor.data = tensor.data.to(device)
        own = dict(model.named_parameters(remove_duplicate=False))
        exchange_weights(self._optimizer, {before[name]: weight for name, weight in own.items()})
