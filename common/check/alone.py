"""The steps of one process alone: the reference for those of all processes."""

import copy
import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from ..data.batches import Batch, ForwardStep, MapDataset, batches
from ..errors import first_line
from ..parallel.guards import checked
from ..parallel.parts import is_divided, kept_tensors
from ..parallel.trainer import weighted_sum
from ..plan import Plan
from ..seeds import UPDATE, generator_states, kept_generators, seed_forward
from .first_pass import FirstPass, evaluated

MAX_SECONDS = 60.0
Outputs = dict[str, tuple[tuple[int, ...], float]]  # {module: (shape, norm) of its output}


class NotChecked(Exception):
    """The check is not possible; the message says why."""


@dataclass
class Step:
    """What an optimizer step did.

    Attributes:
        values: {micro-batch: {name: what `forward_step` returned, float64 on the CPU, of shape (micro_batch,)}}.
        evaluated: the same in evaluation, before the first step, for the first micro-batch.
        samples: {micro-batch: {name: a checksum for each sample}}.
        grad_norm: as in StepResult.
        weights: {name: parameter or buffer after the step, on the CPU}.
        outputs: of the first micro-batch of the first step.
    """

    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    evaluated: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    samples: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    grad_norm: float = math.nan
    weights: dict[str, Tensor] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)


@dataclass
class Alone:
    """Takes optimizer steps with all samples of the global batch in this process.

    Attributes:
        accelerator: says the device and the precision.
        forward_step: as for `fit`.
        train_set: with the run's samples.
        plan: of the run; it says which micro-batches make a step.
        num_skipped: steps before that the loss scaler skipped.
        is_stopping: whether a signal asks the run to stop.
        first_pass: filled by the first forward pass, unless it is None.
    """

    accelerator: Accelerator
    forward_step: ForwardStep
    train_set: MapDataset
    plan: Plan
    num_skipped: int
    is_stopping: Callable[[], bool]
    first_pass: FirstPass | None

    def steps(self, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[Step]:
        """Takes the steps with these numbers. Model and optimizer are afterwards as they were before.

        Raises:
            NotChecked: the steps would take more than a minute, or a signal asks the run to stop.
        """
        device, timeout = self.accelerator.device, self.plan.config.hang_timeout
        self._longest = min(MAX_SECONDS, timeout / 2) if timeout else MAX_SECONDS
        self._deadline, self._fastest = time.monotonic() + self._longest, math.inf
        with kept_generators(device), borrowed(model, optimizer, device), self._in_precision(model):
            model.train()
            return [self._step(model, optimizer, number, numbers) for number in numbers]

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, numbers: range) -> Step:
        plan, config, device = self.plan, self.plan.config, self.accelerator.device
        forward_step = checked(self.forward_step, plan.micro_batch_size)
        step, total, samples = Step(), 0.0, plan.global_micro_batches(number)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * plan.factor_at(number - self.num_skipped)
        started = time.monotonic()
        here = copy.copy(config)
        here.num_workers = 0
        for row, batch in enumerate(batches(self.train_set, samples, device, here)):
            is_first = row == 0 and number == numbers[0]
            first_pass = self.first_pass if is_first else None
            if is_first:
                whole = evaluated(model, forward_step, batch)
                step.evaluated[row] = on_cpu(whole)
                if first_pass is not None and plan.micro_batch_size > 1:
                    first_pass.compare_half(whole, model, self.forward_step, batch)
            seed_forward(config.seed, number, row, device)
            states = None if first_pass is None else generator_states(device)
            with (
                nullcontext() if first_pass is None else first_pass.watched(model, model),
                recorded_outputs(model, step.outputs) if is_first and not config.compile else nullcontext(),
            ):
                values = forward_step(model, batch)
            if first_pass is not None:
                first_pass.draws = generator_states(device) != states
            weighted_sum(values["loss"], batch).backward()
            step.values[row], step.samples[row] = on_cpu(values), checksums(batch)
            total += float(batch["weight"].sum()) if "weight" in batch else plan.micro_batch_size
            self._check_time(time.monotonic() - started, row, number, numbers)
            started = time.monotonic()
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            weight.grad /= total or 1.0
        norm = nn.utils.get_total_norm([weight.grad for weight in weights])
        if config.max_grad_norm:
            nn.utils.clip_grads_with_norm_(weights, config.max_grad_norm, norm)
        seed_forward(config.seed, number, UPDATE, device)
        optimizer.step()
        optimizer.zero_grad()
        step.grad_norm = float(norm)
        step.weights = {name: tensor.detach().cpu().clone() for name, tensor in kept_tensors(model).items()}
        return step

    def _check_time(self, seconds: float, row: int, number: int, numbers: range) -> None:
        """Raises NotChecked if the rest would end after the deadline. The first micro-batch may be slow by itself."""
        if self.is_stopping():
            raise NotChecked("a signal stops the run")
        self._fastest = min(self._fastest, seconds)
        num_rows = self.plan.accumulation * self.plan.layout.data_parallel_size
        left = (numbers[-1] - number) * num_rows + num_rows - row - 1
        is_first = row == 0 and number == numbers[0]
        if time.monotonic() + self._fastest * left > self._deadline and (not is_first or seconds > self._longest / 4):
            raise NotChecked(f"the steps of one process would take more than {self._longest:g} s")

    @contextmanager
    def _in_precision(self, model: nn.Module) -> Iterator[None]:
        """Lets the model run in the precision of the run, as Accelerate does without sharding."""
        if self.plan.layout.precision == "float32":
            yield
            return
        before = vars(model).get("forward")
        autocast = torch.autocast(self.accelerator.device.type, torch.bfloat16)
        forward = autocast(model.forward)
        model.forward = convert_outputs_to_fp32(forward)
        try:
            yield
        finally:
            del model.forward
            if before is not None:
                model.forward = before


def on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of `forward_step` as float64 on the CPU."""
    return {name: value.detach().double().cpu() for name, value in values.items()}


def checksums(batch: Batch) -> dict[str, list[int]]:
    """A checksum of each sample, for each tensor of a batch."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.numel()}
    rows = {name: value.detach().cpu().reshape(len(value), -1) for name, value in tensors.items()}
    return {
        name: [zlib.crc32(row.view(torch.uint8).numpy().tobytes()) for row in value] for name, value in rows.items()
    }


@contextmanager
def recorded_outputs(module: nn.Module, outputs: Outputs) -> Iterator[None]:
    """Writes down shape and norm of the output of each layer in the `with` block, at its first call."""

    def record(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            is_whole = isinstance(value, Tensor) and not is_divided(value)  # to gather others takes all processes
            if is_whole and value.is_floating_point() and name not in outputs:
                outputs[name] = (tuple(value.shape), float(value.detach().double().norm()))

        return hook

    hooks = [layer.register_forward_hook(record(name)) for name, layer in module.named_modules() if name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def borrowed(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Gives model and optimizer copies of their tensors on the device for the `with` block, and their own ones back.

    The objects stay the same, with their hooks: what a closure or an optimizer refers to is what trains. Raises
    NotChecked if a tensor cannot be copied.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # tensors that share one go on sharing its copy
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone() if device.type == "cpu" else storage.to(device=device)
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())

    weights = [(weight, weight.data, weight.grad) for weight in model.parameters()]
    layers = [(layer, dict(layer._buffers), _plain(layer)) for layer in model.modules()]
    try:  # all copies first: if one fails, nothing has changed
        copies = [copied(data) for _, data, _ in weights]
        moved = {id(buffer): copied(buffer) for buffer in model.buffers()}
    except RuntimeError as error:  # such as too little memory, or a kind of tensor without a storage
        raise NotChecked(f"its weights cannot be copied: {first_line(error)}") from None
    try:
        for (weight, _, _), data in zip(weights, copies):
            weight.data = data
        for layer, buffers, _ in layers:
            layer._buffers.update({name: moved[id(buffer)] for name, buffer in buffers.items() if buffer is not None})
        with kept_optimizer(model, optimizer):
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.ndim > 0})
            yield
    finally:
        for weight, data, gradient in weights:
            weight.data, weight.grad = data, gradient
        for layer, buffers, plain in layers:
            layer._buffers.update(buffers)
            vars(layer).update(plain)


@contextmanager
def kept_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives an optimizer a copy of its state for the `with` block, over the same weights, and its own one back."""
    attributes = dict(vars(optimizer))
    pinned = {id(kept): kept for kept in (model, optimizer, *model.modules(), *model.parameters())}
    vars(optimizer).update(copy.deepcopy(attributes, pinned))
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)


def _plain(layer: nn.Module) -> dict[str, Any]:
    """The numbers and words among the attributes of a layer, such as a counter."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, bool | int | float | str)}


def twins(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Copies of model and optimizer; the optimizer's holds the copied weights."""
    memo: dict[int, Any] = {}
    twin = object.__new__(type(optimizer))  # not deepcopy: torch's optimizers leave out the attributes of subclasses
    memo[id(optimizer)] = twin
    copied = copy.deepcopy(model, memo)
    vars(twin).update(copy.deepcopy(vars(optimizer), memo))
    vars(twin).pop("step", None)  # a scheduler's: it would step the original
    return copied, twin


@torch.no_grad()
def move_by_rounding(model: nn.Module, number_of_roundings: int, is_low: bool) -> None:
    """Moves each weight by so many rounding errors, up or down at random.

    Args:
        model: changed in place.
        number_of_roundings: of the weight's type, or of bfloat16.
        is_low: whether the run computes in bfloat16.
    """
    generator = torch.Generator().manual_seed(number_of_roundings)
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            rounding = torch.finfo(torch.bfloat16 if is_low else weight.dtype).eps * number_of_roundings
            sign = torch.randint(2, weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + rounding * sign)
