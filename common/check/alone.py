"""Takes optimizer steps in one process alone, and notes what each does."""

import copy
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from ..data.batches import Batch, ForwardStep, MapDataset, batches
from ..environment import local_world_size, num_cores
from ..norms import clip, norm_of
from ..parallel.batch_loss import Values, first_pass
from ..parallel.engine import weighted_sum
from ..parallel.parts import is_divided, kept_tensors
from ..parallel.setup import Setup, choose_fused_kernels
from ..seeds import UPDATE, kept_generators, seed_forward
from ..stopping import signals
from .copies import NotChecked, borrowed, twins
from .first_pass import FirstPass, evaluated
from .sketch import Sketch

MAX_SECONDS = 60.0
Outputs = dict[str, tuple[tuple[int, ...], float]]  # {module: (shape, norm) of its output}


@dataclass
class Step:
    """What an optimizer step did, as far as it is compared.

    Attributes:
        values: {micro-batch: {name: what `forward_step` or `batch_loss` returned, float64 on the CPU, of shape
            (micro_batch, ...)}}.
        evaluated: what `forward_step` returned in evaluation, before the first step, for the first micro-batch.
        samples: {micro-batch: {name: a checksum for each sample}}.
        grad_norm: as in StepResult.
        weights: {name: parameter or buffer after the step}; of one process alone.
        parts: {(name of a weight, range): (a sum, norm) of this process's part}; of several processes.
        outputs: of the first micro-batch of the first step, in the main process.
    """

    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    evaluated: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    samples: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    grad_norm: float = math.nan
    weights: dict[str, Sketch] = field(default_factory=dict)
    parts: dict[Any, tuple[float, float]] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)


@dataclass
class Alone:
    """Takes optimizer steps with all samples of the global batch in this process.

    Attributes:
        setup: of the run.
        train_set: with the run's samples.
        num_skipped: steps before that the loss scaler skipped.
        first_pass: filled by the first forward pass, unless it is None.
    """

    setup: Setup
    train_set: MapDataset
    num_skipped: int
    first_pass: FirstPass | None

    def twin(self) -> "Alone":
        """Takes the same steps with copies of model and optimizer. Raises NotChecked if they cannot be copied."""
        model, optimizer = twins(self.setup.model, self.setup.optimizer)
        return replace(self, setup=replace(self.setup, model=model, optimizer=optimizer), first_pass=None)

    def steps(self, numbers: Sequence[int], change: Callable[[nn.Module], Any] | None = None) -> dict[int, Step]:
        """Takes the steps with these numbers, from weights that `change` may change. Model and optimizer are afterwards
        as they were before.

        Raises:
            NotChecked: the steps would take more than a minute, or a signal asks the run to stop.
        """
        plan, device = self.setup.plan, self.setup.accelerator.device
        self._first, timeout = numbers[0], plan.config.hang_timeout
        self._longest = min(MAX_SECONDS, timeout / 2) if timeout else MAX_SECONDS
        self._deadline, self._fastest = time.monotonic() + self._longest, math.inf
        num_passes = 1 if self.setup.batch_loss is None else 2
        self._num_left = len(numbers) * plan.accumulation * plan.layout.data_parallel_size * num_passes
        with (
            _all_threads(),
            kept_generators(device),
            borrowed(self.setup.model, self.setup.optimizer, device),
            self._in_precision(),
        ):
            if change is not None:
                change(self.setup.model)
            self.setup.model.train()
            if device.type == "cpu":  # as the run does; torch's loop over the weights takes several times as long
                choose_fused_kernels(self.setup.accelerator, self.setup.optimizer)
            return {number: self._step(number) for number in numbers}

    def _step(self, number: int) -> Step:
        plan, device, model = self.setup.plan, self.setup.accelerator.device, self.setup.model
        forward_step, batch_loss = self.setup.checked_functions()
        for group in self.setup.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * plan.factor_at(number - self.num_skipped)
        shares = [] if batch_loss is None else batch_loss.shares(self._first_values(number, forward_step), number)
        step, total = Step(), 0.0
        for row, batch in enumerate(self._micro_batches(number)):
            is_first = row == 0 and number == self._first
            seed_forward(plan.config.seed, number, row, device)
            with self._noted(forward_step, batch, step) if is_first else nullcontext():
                values = forward_step(model, batch)
            metrics = values | (shares[row].metrics if shares else {})
            loss = weighted_sum(metrics["loss"], batch)
            (loss + shares[row].connection(values) if shares else loss).backward()
            step.values[row], step.samples[row] = on_cpu(metrics), checksums(batch)
            total += float(batch["weight"].sum()) if "weight" in batch else plan.micro_batch_size
        step.grad_norm = self._update(number, total or 1.0)
        step.weights = sketches(model)
        return step

    def _micro_batches(self, number: int) -> Iterator[Batch]:
        """The micro-batches of all processes in a step. Raises NotChecked if the rest would take too long."""
        config, started = copy.copy(self.setup.plan.config), time.monotonic()
        config.num_workers = 0
        samples, device = self.setup.plan.global_micro_batches(number), self.setup.accelerator.device
        for row, batch in enumerate(batches(self.train_set, samples, device, config)):
            yield batch
            self._check_time(time.monotonic() - started, is_first=row == 0 and number == self._first)
            started = time.monotonic()

    def _first_values(self, number: int, forward_step: ForwardStep) -> Values:
        """The values of the global batch, for `batch_loss`."""

        def forward(row: int, batch: Batch) -> Values:
            seed_forward(self.setup.plan.config.seed, number, row, self.setup.accelerator.device)
            return forward_step(self.setup.model, batch)

        plan = self.setup.plan
        num = plan.accumulation * plan.layout.data_parallel_size
        values = first_pass(forward, self._micro_batches(number), num, self.setup.model)
        return {name: rows.flatten(0, 1) for name, rows in values.items()}

    @contextmanager
    def _noted(self, forward_step: ForwardStep, batch: Batch, step: Step) -> Iterator[None]:
        """Notes what is compared of the first forward pass only, which is in the `with` block."""
        model, plan, first_pass = self.setup.model, self.setup.plan, self.first_pass
        whole = evaluated(model, forward_step, batch)
        step.evaluated[0] = on_cpu(whole)
        if first_pass is not None and plan.micro_batch_size > 1:
            first_pass.compare_half(whole, model, self.setup.forward_step, batch)
        with (
            nullcontext() if first_pass is None else first_pass.watched(model, model, self.setup.accelerator.device),
            nullcontext() if plan.config.compile else recorded_outputs(model, step.outputs),
        ):
            yield

    def _update(self, number: int, total: float) -> float:
        """Updates the weights; returns the norm of the gradient."""
        config, optimizer = self.setup.plan.config, self.setup.optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for gradient in gradients:
            gradient /= total
        norm = norm_of(gradients)
        if config.max_grad_norm:
            clip(gradients, norm, config.max_grad_norm)
        seed_forward(config.seed, number, UPDATE, self.setup.accelerator.device)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    def _check_time(self, seconds: float, is_first: bool) -> None:
        """Raises NotChecked if the rest would end after the deadline. The first micro-batch may be slow by itself."""
        if signals.received() is not None:
            raise NotChecked("a signal stops the run")
        self._num_left -= 1
        self._fastest = min(self._fastest, seconds)
        is_late = time.monotonic() + self._fastest * self._num_left > self._deadline
        if is_late and (not is_first or seconds > self._longest / 4):
            raise NotChecked(f"the steps of one process would take more than {self._longest:g} s")

    @contextmanager
    def _in_precision(self) -> Iterator[None]:
        """Lets the model run in the precision of the run, as Accelerate does without sharding."""
        if self.setup.plan.layout.precision == "float32":
            yield
            return
        model, before = self.setup.model, vars(self.setup.model).get("forward")
        autocast = torch.autocast(self.setup.accelerator.device.type, torch.bfloat16)
        model.forward = convert_outputs_to_fp32(autocast(model.forward))
        try:
            yield
        finally:
            del model.forward
            if before is not None:
                model.forward = before


@contextmanager
def _all_threads() -> Iterator[None]:
    """Uses all cores in the `with` block: the other processes of this machine wait."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(min(num_threads * local_world_size(), num_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def sketches(module: nn.Module) -> dict[str, Sketch]:
    """{name: parameter or buffer that checkpoints hold}"""
    return {name: Sketch.of(tensor) for name, tensor in kept_tensors(module).items()}


def on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of `forward_step` as float64 on the CPU. Leaves out predictions, such as the class of each pixel: a
    rounding error changes some of many."""
    compared = {name: value for name, value in values.items() if value.ndim == 1 or value.is_floating_point()}
    return {name: value.detach().double().cpu() for name, value in compared.items()}


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
