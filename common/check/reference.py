"""What the main process does before `prepare`, while the model is whole: it takes the first steps alone."""

import math
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from ..checkpoint.resume import Checkpoint, FreshStart
from ..parallel.on_disk import held_whole
from ..parallel.parts import kept_tensors
from ..parallel.prepare import Setup
from .alone import Alone, Step
from .copies import NotChecked, kept_optimizer


@dataclass
class Reference:
    """The first steps of one process.

    Attributes:
        alone: repeats them, with copies of model and optimizer from before the first step.
        steps: {number: what the step did}.
    """

    alone: Alone
    steps: dict[int, Step]

    @property
    def setup(self) -> Setup:
        """The plan of the run, and the copies."""
        return self.alone.setup

    @property
    def initial(self) -> dict[str, Tensor]:
        """{name: parameter or buffer before the first step}."""
        return kept_tensors(self.setup.model)


def take_reference(alone: Alone, checkpoint: Checkpoint | FreshStart, numbers: range) -> Reference:
    """Takes the steps with these numbers, from a checkpoint whose weights are loaded. Restores model and optimizer.

    Raises:
        NotChecked: the check is not possible.
        UsageError: `forward_step` does not call the model.
    """
    setup = alone.setup
    _check_possible(setup, is_resumed=numbers[0] > 0)
    try:
        with held_whole(setup.model), kept_optimizer(setup.model, setup.optimizer):
            checkpoint.load_optimizer(setup.model, setup.optimizer)
            return Reference(alone.twin(), alone.steps(numbers))
    except (torch.OutOfMemoryError, MemoryError):
        raise NotChecked("one device has too little memory for the whole model") from None


def _check_possible(setup: Setup, is_resumed: bool) -> None:
    """Raises NotChecked for fp16 and for a model that leaves no room for the copies."""
    plan, device = setup.plan, setup.accelerator.device
    if plan.layout.precision == "fp16":
        raise NotChecked("fp16 skips steps")
    num_bytes = sum(weight.nbytes for weight in setup.model.parameters())
    # Weights, gradients and two slots of an optimizer; beside them a copy of the weights, and all after each step.
    room = psutil.virtual_memory().available
    num_loaded = 4 if is_resumed else 0  # the optimizer state of a checkpoint, twice
    needed = num_bytes * (1 + num_loaded + plan.config.check_steps + (4 if device.type == "cpu" else 0))
    on_device = math.inf if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]
    if needed > room or 4 * num_bytes > on_device:
        raise NotChecked(f"{4 * num_bytes / 2**30:.3g} GiB for the whole model on one device are too much")
