"""Takes optimizer steps in one process alone, with the objects that the user made."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from ..alone.kept import Changes, NotChecked, kept
from ..alone.world import one_process
from ..checkpoint.resume import Checkpoint, FreshStart
from ..data.batches import batches
from ..data.sets import Batch, MapDataset, NumberedStep
from ..environment import num_cores
from ..errors import UsageError
from ..plan import Plan
from ..seeds import restore_generators
from ..step.engine import Engine
from ..step.optimizer import choose_fused_kernels
from ..step.setup import Setup
from ..stopping import signals
from ..weights.shards import checkpoint_tensors
from .first_pass import FirstPass
from .modules import ModuleTrace
from .sketch import Sketch
from .trace import Observer, Step

MAX_SECONDS = 60.0
SMALL = 10_000_000  # bytes of weights up to which threads wait for each other longer than they compute


@dataclass
class ReferenceRun:
    """Takes optimizer steps with all samples of the global batch in this process: the same engine at size 1.

    Attributes:
        setup: of the run.
        train_set: with the run's samples.
        checkpoint: from which the run starts; its weights are loaded.
        is_low: whether a layer computed with fewer bits than float32; set by the first steps.
        changes: what the first steps changed in the recipe's objects.
        seconds: that the fastest step took.
    """

    setup: Setup
    train_set: MapDataset
    checkpoint: Checkpoint | FreshStart
    is_low: bool = False
    changes: Changes | None = None
    seconds: float = math.inf

    def steps(
        self,
        numbers: Sequence[int],
        first_pass: FirstPass | None,
        change: Callable[[nn.Module], Any] | None = None,
        afterwards: Callable[[Engine, Batch], Any] | None = None,
        first: int | None = None,
    ) -> dict[int, Step]:
        """Takes the steps with these numbers, and before them those from `first`, from weights that `change` may
        change, and calls `afterwards` with the engine and the last micro-batch. Then model, optimizer and all that the
        recipe's functions refer to are as they were before.

        Raises:
            NotChecked: the steps would take more than a minute, or a signal asks the run to stop.
            UsageError: `forward_step` does not call the model, or moves an iterator on.
        """
        setup, plan, every = self.setup, self._plan(), range(numbers[0] if first is None else first, numbers[-1] + 1)
        device, model, optimizer = setup.accelerator.device, setup.model, setup.optimizer
        functions = [each for each in (setup.forward_step, setup.batch_loss, plan.schedule) if each is not None]
        observer = Observer(first_pass)
        with (
            _threads_of_all(model, setup.plan.layout.environment.local_world_size),
            one_process(setup.accelerator),
            restore_generators(device),
            kept(model, optimizer, functions, device) as changes,
        ):
            self.checkpoint.load_optimizer(model, optimizer)
            if change is not None:
                change(model)
            timer = _Timer(plan.config.hang_timeout, len(every) * plan.accumulation)
            if device.type == "cpu":  # as the run does; torch's loop over the weights takes several times as long
                choose_fused_kernels(setup.accelerator, optimizer)
            _use_precision(model, plan.layout.precision, device)
            engine = Engine(timer.timing(observer.watch(replace(setup, plan=plan))), model, optimizer)
            stream = batches(self.train_set, plan.micro_batches(every[0]), device, plan.config)
            steps = {}
            for number in every:
                engine.set_learning_rate(plan.factor_at(number - self.checkpoint.state.num_skipped))
                micro_batches, began = list(islice(stream, plan.accumulation)), time.monotonic()
                if number in numbers:
                    modules = ModuleTrace(parts=setup.plan.layout.tp * setup.plan.layout.sp)
                    with _record_gradients(optimizer, model) as gradients:
                        steps[number], _ = observer.step(engine, number, micro_batches, number == numbers[0], modules)
                    steps[number].weights, steps[number].gradients = sketches(model), gradients
                    steps[number].modules = modules.on_cpu()
                    self.is_low = self.is_low or modules.is_low
                else:
                    engine.step(number, micro_batches, wants_norm=False)
                self.seconds = min(self.seconds, time.monotonic() - began)
            if afterwards is not None:
                afterwards(engine, micro_batches[-1])
        self.changes = self.changes or changes
        for name in changes.lost:
            raise UsageError(
                f"forward_step changes {name}, which the parity check cannot restore: give it a third argument, "
                "step, the number of the optimizer step, and compute from it"
            )
        return steps

    def _plan(self) -> Plan:
        config = copy.copy(self.setup.plan.config)
        config.num_workers, config.ema_decay, config.compile = 0, 0.0, False
        return replace(self.setup.plan.of_one_process(), config=config)


class _Timer:
    """Ends steps that would take too long.

    Args:
        hang_timeout: of the run, in seconds; 0: none.
        num_passes: forward passes for gradients.
    """

    def __init__(self, hang_timeout: float, num_passes: int):
        self._longest = min(MAX_SECONDS, hang_timeout / 2) if hang_timeout else MAX_SECONDS
        self._num_passes, self._num_done, self._fastest = num_passes, 0, math.inf
        self._started = self._last = time.monotonic()

    def timing(self, setup: Setup) -> Setup:
        """The setup of an engine whose passes are timed."""
        watched = setup.watched
        assert watched is not None
        return replace(setup, watched=lambda values_of: self._time(watched(values_of)))

    def _time(self, values_of: NumberedStep) -> NumberedStep:
        def timed_values(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
            if torch.is_grad_enabled():
                self._check()
            return values_of(model, batch, number)

        return timed_values

    def _check(self) -> None:
        """Raises NotChecked if the rest would end after the deadline. The first pass may be slow by itself."""
        if signals.received_signal() is not None:
            raise NotChecked("a signal stops the run")
        now = time.monotonic()
        seconds = now - self._last
        is_usual = self._num_done > 1 or seconds > self._longest / 4
        if self._num_done and is_usual:
            self._fastest = min(self._fastest, seconds)
            if now + self._fastest * (self._num_passes - self._num_done) > self._started + self._longest:
                raise NotChecked(f"the steps of one process would take more than {self._longest:g} s")
        self._last, self._num_done = now, self._num_done + 1


@contextmanager
def _record_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[dict[str, Sketch]]:
    """{name: gradient} that the optimizer gets in the `with` block."""
    gradients: dict[str, Sketch] = {}

    def note(*args: Any) -> None:
        for name, weight in model.named_parameters():
            if weight.grad is not None and weight.grad.layout is torch.strided:
                gradients[name] = Sketch.of(weight.grad)

    hook = optimizer.register_step_pre_hook(note)
    try:
        yield gradients
    finally:
        hook.remove()


def _use_precision(model: nn.Module, precision: str, device: torch.device) -> None:
    """Runs the model in the precision of the run, as Accelerate does without sharding."""
    if precision != "float32":
        autocast = torch.autocast(device.type, torch.bfloat16)
        model.forward = convert_outputs_to_fp32(autocast(model.forward))


@contextmanager
def _threads_of_all(model: nn.Module, num_processes: int) -> Iterator[None]:
    """Uses all cores in the `with` block, unless the model is small: the other processes of this machine wait."""
    num_threads, num_bytes = torch.get_num_threads(), sum(weight.nbytes for weight in model.parameters())
    torch.set_num_threads(num_threads if num_bytes <= SMALL else min(num_threads * num_processes, num_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def sketches(module: nn.Module) -> dict[str, Sketch]:
    """{name: parameter or buffer that checkpoints hold}"""
    return {name: Sketch.of(tensor) for name, tensor in checkpoint_tensors(module).items()}
