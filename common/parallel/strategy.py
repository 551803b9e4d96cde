"""The interface of a strategy of parallelism: all that the loop asks of one. Each is one module beside this one, and a
line in strategies.py."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from accelerate.utils import DistributedType
from torch import nn

from ..config import RunConfig
from ..layout import Layout
from ..plan import Plan
from ..step.engine import Engine
from ..step.setup import Setup
from .grid import Division, Grid, Part

LaunchCheck = Callable[[Layout, RunConfig], None]
ModelCheck = Callable[[nn.Module, torch.optim.Optimizer, Plan], None]


class Strategy:
    """A strategy of parallelism. A layout combines one or several; one of them wraps the model.

    Attributes:
        name: for the terminal.
        axis: of a layout, if it has one of its own.
        wraps: whether it can be the one that wraps the model; the first such strategy of a layout does.
        distributed_type: of Accelerate, if it has one for this strategy.
        needs_all_weights: whether each forward pass must use all weights.
        takes_means: whether what wraps the model takes the mean of the processes' gradients. Others take the sum.
        takes_fp16: whether it knows the loss scaling of fp16.
        of_weights: whether it divides weights, and not only what a pass computes.
        launch_checks: raise UsageError for a launch that cannot work.
        model_checks: raise UsageError for a model or optimizer that this strategy cannot train with the result of one
            process.
        fallback: what to type for a model that this strategy cannot train.
        cause_at_once: what this strategy may have to do with values of `forward_step` that differ from those of one
            process in the first step, and what to type; "" if nothing. `verdict` in check/ fills it in.
        cause_in_update: the same, where only the weights differ after a step.
    """

    name: ClassVar[str]
    axis: ClassVar[str] = ""
    wraps: ClassVar[bool] = True
    distributed_type: ClassVar[DistributedType | None] = None
    needs_all_weights: ClassVar[bool] = False
    takes_means: ClassVar[bool] = False
    takes_fp16: ClassVar[bool] = True
    of_weights: ClassVar[bool] = True
    launch_checks: ClassVar[tuple[LaunchCheck, ...]] = ()
    model_checks: ClassVar[tuple[ModelCheck, ...]] = ()
    fallback: ClassVar[str] = "--config_file accelerate_configs/ddp.yaml"
    cause_at_once: ClassVar[str] = ""
    cause_in_update: ClassVar[str] = (
        "{optimizer} does not get each weight whole, or keeps weights beside param_groups and state; or a hook finds "
        "weights by id(p), and the config makes new ones; or forward_step takes gradients itself, as a penalty does: "
        "use {fallback}"
    )

    def is_requested(self, layout: Layout) -> bool:
        """Whether the config file or the flags ask for this strategy. Of the layout, the sizes from these are known."""
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
        """What `divide` needs to know about the whole model, which `model_checks` accepted. Only the main process
        calls it. Raises UsageError if this strategy cannot divide it."""

    def divide(self, part: Part, plan: Any, grid: Grid) -> None:
        """Divides what this process runs of the model in place. Its weights may still be on the meta device."""

    def wrap(self, setup: Setup, division: Division) -> Engine:
        """Divides the model, and wraps it and the optimizer into what takes the steps. `check_trainable` has accepted
        them."""
        raise AssertionError(f"{self.name} wraps no model")
