"""What the main process does before `prepare`, while the model is whole: it takes the first steps alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch
from torch import nn

from ..alone.kept import Changes, NotChecked
from ..data.sets import Batch, as_numbered_step
from ..errors import is_out_of_memory
from ..step.engine import Engine
from ..step.setup import Setup
from ..weights.on_disk import with_full_weights
from .first_pass import FirstPass
from .reference_run import ReferenceRun, sketches
from .sketch import BLOCK, Sketch, random_signs
from .trace import Step

# The weights are perturbed by so many rounding errors (ulp) to measure the noise floor. A few elements of a weight take
# another way under Adam: with one rounding error often none, where the run has some. A large weight has many elements.
ROUNDINGS = (8, 4)
LARGE = 100_000_000  # bytes of weights from which on one measurement is enough


@dataclass
class Perturbed:
    """The first steps of one process from weights that are perturbed.

    Attributes:
        steps: {number: what the step did}.
        start: {name: weight from which they start}.
    """

    steps: dict[int, Step]
    start: dict[str, Sketch]

    @classmethod
    def take(cls, run: ReferenceRun, numbers: Sequence[int], roundings: int, first: int | None = None) -> "Perturbed":
        """Takes these steps, after those from `first` on, from weights perturbed by so many rounding errors."""
        start: dict[str, Sketch] = {}

        def change(model: nn.Module) -> None:
            perturb(model, roundings, run.is_low)
            start.update(sketches(model))

        return cls(run.steps(numbers, None, change, first=first), start)


@torch.no_grad()
def perturb(model: nn.Module, roundings: int, is_low: bool = False) -> None:
    """Moves each weight by so many rounding errors of its type, or with `is_low` of bfloat16, up or down at random."""
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            rounding = torch.finfo(torch.bfloat16 if is_low else weight.dtype).eps * roundings
            values = weight.data.reshape(-1)  # a view, unless the weight is not contiguous
            for block, signs in zip(values.split(BLOCK), random_signs(weight.device, weight.dtype, roundings)):
                block.mul_((signs[: len(block)] * rounding).add_(1))
            if values.data_ptr() != weight.data_ptr():
                weight.copy_(values.view_as(weight))


@dataclass
class Reference:
    """The first steps of one process, from the start of the run.

    Attributes:
        initial: {name: parameter or buffer before the first step}.
        steps: {number: what the step did}.
        perturbed: the steps from weights that are perturbed by rounding errors.
        is_low: whether a layer computes with fewer bits than float32.
        changes: what they changed in the recipe's objects, before it was given back.
        again: the first step once more, when all had been given back.
    """

    initial: dict[str, Sketch]
    steps: dict[int, Step]
    perturbed: list[Perturbed]
    is_low: bool
    changes: Changes = field(default_factory=Changes)
    again: Step = field(default_factory=Step)


def take_reference(run: ReferenceRun, numbers: range, first_pass: FirstPass) -> Reference:
    """Takes the steps with these numbers. Model, optimizer and the recipe's functions are afterwards as before.

    Raises:
        NotChecked: the check is not possible.
        UsageError: `forward_step` does not call the model.
    """
    setup, values_of = run.setup, as_numbered_step(run.setup.forward_step)

    def compare_half(engine: Engine, batch: Batch) -> None:
        if setup.plan.micro_batch_size > 1:
            first_pass.compare_half(engine.model, values_of, batch, numbers[0])

    _check_possible(setup, is_resumed=numbers[0] > 0)
    num_bytes = sum(weight.nbytes for weight in setup.model.parameters())
    try:
        with with_full_weights(setup.model):
            initial = sketches(setup.model)
            steps = run.steps(numbers, first_pass)
            is_bf16 = setup.plan.layout.precision == "bf16"
            has_layers = any(module for _, (module, _, _) in steps[numbers[0]].modules.forward)
            run.is_low = run.is_low or (is_bf16 and not has_layers)  # a model that is one layer shows none
            roundings = ROUNDINGS[:1] if num_bytes > LARGE else ROUNDINGS
            perturbed = [Perturbed.take(run, numbers, number) for number in roundings]
            again = run.steps(numbers[:1], None, afterwards=compare_half)[numbers[0]]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise NotChecked("one device has too little memory for the whole model") from None
    assert run.changes is not None
    first_pass.keeps, first_pass.files = run.changes.names, run.changes.files
    types = {weight.dtype for weight in setup.model.parameters() if weight.requires_grad}
    low = [str(each).removeprefix("torch.") for each in types if each in (torch.bfloat16, torch.float16)]
    first_pass.low_weights = ", ".join(low)
    first_pass.has_low_layers = run.is_low and not low and setup.plan.layout.precision == "float32"
    first_pass.has_no_low_layers = is_bf16 and not run.is_low
    if run.changes.generators:  # half a micro-batch got other random numbers
        first_pass.mixes = []
    return Reference(initial, steps, perturbed, run.is_low, run.changes, again)


def _check_possible(setup: Setup, is_resumed: bool) -> None:
    """Raises NotChecked for fp16 and for a model that leaves no room for the copies."""
    device = setup.accelerator.device
    num_bytes = sum(weight.nbytes for weight in setup.model.parameters())
    # On the CPU: a copy of the weights, gradients and two slots of an optimizer; anywhere the state of a checkpoint.
    needed = num_bytes * ((4 if device.type == "cpu" else 0) + (2 if is_resumed else 0))
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
