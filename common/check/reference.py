"""Takes the first steps of a run on the main process alone, before `prepare`, with the user's own objects."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import psutil
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from ..alone.kept import Changes, NotChecked, kept
from ..alone.passes import one_process
from ..checkpoint.resume import Checkpoint
from ..data.batches import batches
from ..data.sets import Batch, as_numbered_step
from ..environment import num_cores
from ..errors import UsageError, is_out_of_memory
from ..layout import Layout
from ..plan import Plan
from ..seeds import restore_generators
from ..step.engine import Engine
from ..step.optimizer import choose_fused_kernels
from ..step.setup import Setup
from ..stopping import signals
from ..weights.on_disk import with_full_weights
from ..weights.shards import checkpoint_tensors
from .first_pass import FirstPass, one_pass, outcome_of
from .modules import ModuleTrace
from .sketch import BLOCK, Sketch, random_signs
from .tolerances import BF16, LATER
from .trace import Observer, Step

MAX_SECONDS = 60.0
SMALL = 10_000_000  # bytes of weights; with fewer, threads wait longer for each other than they compute


@dataclass
class ReferenceRun:
    """Takes optimizer steps with all samples of the global batch in this process: the same engine at size 1."""

    setup: Setup  # of the run
    checkpoint: Checkpoint  # the start of the run; its weights are loaded
    numbers: range  # of the steps that are checked
    first_pass: FirstPass  # of the first of them
    is_low: bool = False  # whether a layer computed with fewer bits than float32; set by the first steps
    changes: Changes | None = None  # what the first steps changed in the recipe's objects
    seconds: float = math.inf  # that the fastest step took

    def steps(
        self,
        numbers: Sequence[int],
        first_pass: FirstPass | None,
        change: Callable[[nn.Module], Any] | None = None,
        compares: FirstPass | None = None,
        first: int | None = None,
        evaluate: Callable[[Engine, int], Any] | None = None,
        forgets: bool = False,
    ) -> dict[int, Step]:
        """Takes the steps with these numbers, after the steps from `first` on; `change` may first change weights; then
        `compares` halves of a micro-batch. `evaluate` takes the evaluations between them, after a number of steps;
        `forgets`: the first step leaves only what a checkpoint stores. Restores model, optimizer and all that the
        recipe's functions refer to. Raises NotChecked if the steps would take more than a minute, or a signal asks
        the run to stop; UsageError if `forward_step` advances an iterator."""
        setup, every = self.setup, range(numbers[0] if first is None else first, numbers[-1] + 1)
        config = copy.copy(setup.plan.config)
        # Only evaluations read the moving averages.
        config.num_workers, config.compile, config.ema_decay = 0, False, config.ema_decay * (evaluate is not None)
        layout, num_rows = setup.plan.layout, setup.plan.accumulation * setup.plan.layout.data_parallel_size
        single = Layout(precision=layout.precision, device=layout.device)
        plan = replace(setup.plan, layout=single, accumulation=num_rows, config=config)  # all processes' micro-batches
        device, model, optimizer = setup.accelerator.device, setup.model, setup.optimizer
        of_evaluations = [setup.options.get(name) for name in ("summarize", "examples") if evaluate is not None]
        functions = [setup.forward_step, setup.batch_loss, plan.schedule, *of_evaluations]
        observer = Observer(first_pass, layout)
        autocast: Any = nullcontext()
        if plan.layout.precision != "float32":  # as Accelerate does without sharding
            forward = convert_outputs_to_fp32(torch.autocast(device.type, torch.bfloat16)(model.forward))
            autocast = patch.object(getattr(model, "_actual_script_module", model), "forward", forward)  # of a trace
        with (
            _threads_of_all(model, layout.environment.local_world_size),
            one_process(setup.accelerator),
            restore_generators(device),
            kept(model, optimizer, functions, device) as changes,
            autocast,
        ):
            if change is not None:
                change(model)
            if device.type == "cpu":  # as the run does; torch's loop over the weights takes several times as long
                choose_fused_kernels(setup.accelerator, optimizer)
            alone = _ending_in_time(replace(setup, plan=plan), len(every) * plan.accumulation)
            engine = Engine(observer.watch(alone), model, optimizer)
            self.checkpoint.load_state(engine)
            stream = batches(setup.train_set, plan.micro_batches(every[0]), device, plan.config)
            steps = {}
            for number in every:
                engine.set_learning_rate(plan.factor_at(number - self.checkpoint.state.num_skipped))
                micro_batches, began = list(islice(stream, plan.accumulation)), time.monotonic()
                if number in numbers:
                    modules = ModuleTrace(parts=setup.plan.layout.tp * setup.plan.layout.sp)
                    with gradients_of(optimizer, model.named_parameters, Sketch.of) as gradients:
                        when = self.first_pass.evaluation_at(number, self.numbers)
                        steps[number], _ = observer.step(engine, number, micro_batches, when, modules)
                    steps[number].weights, steps[number].gradients = sketches(model), gradients
                    steps[number].modules = modules.on_cpu()
                    self.is_low = self.is_low or modules.is_low
                else:
                    engine.step(number, micro_batches, wants_norm=False)
                if evaluate is not None and plan.evaluates(number + 1):
                    evaluate(engine, number + 1)
                elif change is not None and plan.evaluates(number + 1):  # what that changes later is noise
                    with one_pass(model, micro_batches[0]) as batch:
                        engine.evaluate(batch, number)
                if forgets and number == every[0]:
                    changes.forget()
                changes.step = number if number > every[0] else None  # a first step is 0, as other numbers are
                self.seconds = min(self.seconds, time.monotonic() - began)
            if compares is not None:
                self._compare_halves(compares, plan, number, changes)
        self.changes = self.changes or changes
        for name in changes.lost:
            raise UsageError(
                f"forward_step changes {name}, which the parity check cannot restore: give it a third argument, "
                "step, the number of the optimizer step, and compute from it"
            )
        return steps

    def _compare_halves(self, compares: FirstPass, plan: Plan, number: int, changes: Changes) -> None:
        """Compares halves of micro-batches of step `number`: in all, a few samples are enough."""
        setup, device, model = self.setup, self.setup.accelerator.device, self.setup.model
        size, epoch = min(max(2, plan.micro_batch_size), 8), number // plan.steps_per_epoch
        is_large = sum(weight.nbytes for weight in model.parameters()) > LARGE
        compares.holds = bool((self.changes or changes).in_model)
        end = (number % plan.steps_per_epoch + 1) * plan.config.batch_size
        unseen = plan.epoch_order(epoch).roll(-end)[:size] if compares.holds else None
        fetch = lambda ids: next(batches(setup.train_set, [(epoch, ids)], device, plan.config))  # noqa: E731
        take = partial(outcome_of, model, as_numbered_step(setup.forward_step), number)
        for few in torch.cat(plan.own_samples(number))[: size if is_large else 8].split(size):
            if not compares.mixes:  # the next ones may show it, such as two samples of one class
                compares.compare_halves(take, fetch, few, BF16[""] if self.is_low else LATER, unseen, changes.sizes)


def _ending_in_time(setup: Setup, num_passes: int) -> Setup:
    """A setup whose passes raise NotChecked if `num_passes` passes, the first perhaps slow, would take too long."""
    longest = min(MAX_SECONDS, setup.plan.config.hang_timeout / 2 or MAX_SECONDS)
    values_of, num_done, fastest = as_numbered_step(setup.forward_step), 0, math.inf
    started = last = time.monotonic()

    def timed_values(model: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        nonlocal num_done, fastest, last
        if torch.is_grad_enabled():
            if signals.received_signal() is not None:
                raise NotChecked("a signal stops the run")
            now = time.monotonic()
            if num_done > 1 or (num_done and now - last > longest / 4):
                fastest = min(fastest, now - last)
                if now + fastest * (num_passes - num_done) > started + longest:
                    raise NotChecked(f"the steps of one process would take more than {longest:g} s")
            last, num_done = now, num_done + 1
        return values_of(model, batch, step)

    return replace(setup, forward_step=timed_values)


@contextmanager
def gradients_of(
    optimizer: torch.optim.Optimizer,
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    keep: Callable[[Tensor], Any] = lambda gradient: gradient,
) -> Iterator[dict[str, Any]]:
    """{weight: `keep` of the gradient that the optimizer gets in the `with` block}; empty under ZeRO."""
    gradients = dict[str, Any]()

    def note(*args: Any) -> None:
        found = ((name, weight.grad) for name, weight in weights())
        gradients.update((name, keep(grad)) for name, grad in found if grad is not None and not grad.is_sparse)

    with optimizer.register_step_pre_hook(note):
        yield gradients


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


# To measure the noise floor, the weights are perturbed by this number of rounding errors (ulp). Under Adam, a few
# elements of a weight then move differently; with one rounding error often none does, but in the run some do.
ROUNDINGS = (8, 4)
LARGE = 100_000_000  # bytes of weights above which one measurement is enough: there are many elements


@dataclass
class Perturbed:
    """The first steps of one process from weights that are perturbed."""

    steps: dict[int, Step]  # {number: what the step did}
    start: dict[str, Sketch]  # {name: weight at their start}

    @classmethod
    def take(cls, run: ReferenceRun, numbers: Sequence[int], roundings: int, **options: Any) -> "Perturbed":
        """Takes these steps from weights perturbed by `roundings` rounding errors, with `options` of `steps`."""
        start: dict[str, Sketch] = {}

        def change(model: nn.Module) -> None:
            perturb(model, roundings, run.is_low)
            start.update(sketches(model))

        return cls(run.steps(numbers, None, change, **options), start)


@torch.no_grad()
def perturb(model: nn.Module, roundings: int, is_low: bool = False) -> None:
    """Moves each weight up or down at random, by `roundings` rounding errors of its type, or of bfloat16 (`is_low`)."""
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
    """The first steps of one process, from the start of the run."""

    initial: dict[str, Sketch]  # {name: parameter or buffer before the first step}
    steps: dict[int, Step]  # {number: what the step did}
    perturbed: list[Perturbed]  # the steps from weights that are perturbed by rounding errors
    is_low: bool  # whether a layer computes with fewer bits than float32
    changes: Changes = field(default_factory=Changes)  # of the recipe's objects, before they were restored
    again: Step = field(default_factory=Step)  # the first step once more, after all was restored
    forgotten: Step | None = None  # the last step, if only what a checkpoint stores is left of those before it


def take_reference(run: ReferenceRun) -> Reference:
    """Takes the steps that are checked. Afterwards restores model, optimizer and the recipe's functions. Raises
    NotChecked if the check is not possible, and UsageError if `forward_step` cannot be repeated."""
    setup, numbers, first_pass = run.setup, run.numbers, run.first_pass
    num_bytes = sum(weight.nbytes for weight in setup.model.parameters())
    _check_possible(setup, num_bytes, is_resumed=numbers[0] > 0)
    try:
        with with_full_weights(setup.model):
            initial = sketches(setup.model)
            steps = run.steps(numbers, first_pass)
            is_bf16 = setup.plan.layout.precision == "bf16"
            has_layers = any(module for _, (module, _, _) in steps[numbers[0]].modules.forward)
            run.is_low = run.is_low or (is_bf16 and not has_layers)  # a model of a single layer shows no layers
            roundings = ROUNDINGS[:1] if num_bytes > LARGE else ROUNDINGS
            perturbed = [Perturbed.take(run, numbers, number) for number in roundings]
            again = run.steps(numbers[:1], None, compares=first_pass)[numbers[0]]
            assert run.changes is not None
            forgotten = None
            if len(numbers) > 1 and run.changes.all_names():
                with suppress(Exception):  # a step may fail without what it needs; a resumed run would show that
                    forgotten = run.steps(numbers, None, forgets=True)[numbers[-1]]
            steps[numbers[0]].evaluated = (again if first_pass.written else steps[numbers[0]]).evaluated
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise NotChecked("one device has too little memory for the whole model") from None
    first_pass.keeps += run.changes.names + run.changes.generators + run.changes.in_model * first_pass.moves
    first_pass.files = run.changes.files
    types = {str(weight.dtype).removeprefix("torch.") for weight in setup.model.parameters() if weight.requires_grad}
    low = first_pass.low_weights = ", ".join(types & {"bfloat16", "float16"})
    first_pass.has_low_layers = run.is_low and not low and setup.plan.layout.precision == "float32"
    first_pass.has_no_low_layers = is_bf16 and not run.is_low
    return Reference(initial, steps, perturbed, run.is_low, run.changes, again, forgotten)


def _check_possible(setup: Setup, num_bytes: int, is_resumed: bool) -> None:
    """Raises NotChecked for fp16 and for a model, of `num_bytes`, that leaves no room for the copies."""
    device = setup.accelerator.device
    # On the CPU, a copy of the weights, gradients and two optimizer slots; on any device, the state of a checkpoint.
    needed = num_bytes * ((4 if device.type == "cpu" else 0) + (2 if is_resumed else 0))
    on_device = math.inf if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]
    on_device = on_device if needed <= psutil.virtual_memory().available else 0
    if (reason := why_not_checked(setup.plan.layout.precision, num_bytes, on_device)) is not None:
        raise NotChecked(reason)


def why_not_checked(precision: str, num_bytes: int, on_device: float) -> str | None:
    """Why one device cannot take the steps, or None. `num_bytes`: of the whole model; `on_device`: free there."""
    if precision == "fp16":
        return "fp16 skips steps"
    too_much = f"the whole model needs {4 * num_bytes / 2**30:,.1f} GiB, too much for one device"
    return too_much if 4 * num_bytes > on_device else None
