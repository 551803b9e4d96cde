"""What the main process does before `prepare`, while the model is whole: it takes the first steps alone."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil
import torch
from torch import nn

from ..checkpoint.resume import Checkpoint, FreshStart
from ..parallel.on_disk import held_whole
from ..parallel.setup import Setup
from .alone import Alone, Step, sketches
from .copies import NotChecked, kept_optimizer
from .sketch import Sketch

# Rounding errors by which the weights are moved, until the differences are explained. Few elements of a large weight
# take another way under Adam: with one rounding error often none, where the run has some.
ROUNDINGS = (4, 8, 2, 1)
LARGE = 100_000_000  # bytes of weights: a model whose steps are repeated while the memory of training is still free


@dataclass
class Moved:
    """The first steps of one process from weights that are moved a little.

    Attributes:
        steps: {number: what the step did}.
        start: {name: weight from which they start}.
    """

    steps: dict[int, Step]
    start: dict[str, Sketch]

    @classmethod
    def taken(cls, alone: Alone, numbers: Sequence[int], roundings: int) -> "Moved":
        """Takes these steps, from weights that are moved by so many rounding errors."""
        start: dict[str, Sketch] = {}
        is_low = alone.setup.plan.layout.precision != "float32"

        def move(model: nn.Module) -> None:
            _move_by_rounding(model, roundings, is_low)
            start.update(sketches(model))

        return cls(alone.steps(numbers, move), start)


@torch.no_grad()
def _move_by_rounding(model: nn.Module, roundings: int, is_low: bool) -> None:
    """Moves each weight by so many rounding errors of its type, or with `is_low` of bfloat16, up or down at random."""
    generator = torch.Generator().manual_seed(roundings)
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            rounding = torch.finfo(torch.bfloat16 if is_low else weight.dtype).eps * roundings
            sign = torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            weight.mul_((sign.to(weight.dtype) * rounding).add_(1).to(weight.device))


@dataclass
class Reference:
    """The first steps of one process.

    Attributes:
        alone: repeats them, with copies of model and optimizer from before the first step.
        initial: {name: parameter or buffer before the first step}.
        steps: {number: what the step did}.
        moved: {rounding errors: the steps from weights that are moved by so many}.
        repeated: the steps once more, by the copies, if they had to be repeated.
    """

    alone: Alone
    initial: dict[str, Sketch]
    steps: dict[int, Step]
    moved: dict[int, Moved] = field(default_factory=dict)
    repeated: dict[int, Step] | None = None


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
            steps, moved = alone.steps(numbers), dict[int, Moved]()
            if sum(weight.nbytes for weight in setup.model.parameters()) > LARGE:
                with suppress(NotChecked, torch.OutOfMemoryError, MemoryError):
                    moved[ROUNDINGS[0]] = Moved.taken(replace(alone, first_pass=None), numbers, ROUNDINGS[0])
            return Reference(alone.twin(), sketches(setup.model), steps, moved)
    except (torch.OutOfMemoryError, MemoryError):
        raise NotChecked("one device has too little memory for the whole model") from None


def _check_possible(setup: Setup, is_resumed: bool) -> None:
    """Raises NotChecked for fp16 and for a model that leaves no room for the copies."""
    device = setup.accelerator.device
    num_bytes = sum(weight.nbytes for weight in setup.model.parameters())
    # A copy of the weights for the replays; on the CPU also the weights, gradients and two slots of an optimizer.
    num_loaded = 4 if is_resumed else 0  # the optimizer state of a checkpoint, twice
    needed = num_bytes * (1 + num_loaded + (4 if device.type == "cpu" else 0))
    on_device = math.inf if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]
    reason = why_not_checked(setup.plan.layout.precision, num_bytes, on_device)
    if reason is None and needed > psutil.virtual_memory().available:
        reason = _too_much(num_bytes)
    if reason is not None:
        raise NotChecked(reason)


def why_not_checked(precision: str, num_bytes: int, on_device: float) -> str | None:
    """Why one device cannot take the steps alone; None if it can.

    Args:
        precision: of the run.
        num_bytes: of the weights of the whole model.
        on_device: bytes that are free there.
    """
    if precision == "fp16":
        return "fp16 skips steps"
    return _too_much(num_bytes) if 4 * num_bytes > on_device else None


def _too_much(num_bytes: int) -> str:
    return f"{4 * num_bytes / 2**30:,.1f} GiB for the whole model on one device are too much"
