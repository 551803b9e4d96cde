"""Repeats the first optimizer steps of a run on the main process alone, and compares them."""

import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..alone.kept import NotChecked
from ..checkpoint.resume import Checkpoint
from ..cpu_group import CpuGroup
from ..data.batches import draws_for_batches
from ..data.sets import Batch, Metrics
from ..errors import RunError, UsageError, annotate_errors, list_samples, needs_no_traceback
from ..failure import line_of
from ..package import is_own
from ..parallel.strategies import DDP, main_strategy, prepare, strategies_of
from ..step.engine import StepResult
from ..step.setup import Setup
from .compare import Gap, Key, fingerprints, replica_gaps, step_gaps, weight_gap
from .first_difference import FirstDifference
from .first_pass import FirstPass
from .later import AfterSaves, Rehearsal
from .modules import ModuleTrace, PlaceInRow
from .noise import without_noise
from .reference import Reference, ReferenceRun, gradients_of, take_reference
from .sketch import Sketch
from .trace import Observer, Step
from .verdict import lost_at_resume, not_repeated, verdict


class ParityCheck:
    """Checks the first `--check_steps` steps of a run against one process.

    First the main process takes these steps alone, before the config wraps or divides the model, with the samples of
    all processes. It uses the user's own model, optimizer and functions, which see a single process, and restores them
    afterwards. Then all processes take the steps together and compare: the values of each sample, the norm of the
    gradient, the update of each weight. A difference of more than 1e-5 is compared with the noise floor: how much
    rounding errors in the weights change on one process. A larger difference ends the run before it saves anything.

    `setup`: of the run; `check_trainable` has accepted it. `checkpoint`: the start of the run; its weights are loaded,
    its optimizer state is not. `facts`: for the run card: the check adds how many steps are checked, how long that
    took, and whether the forward pass or a batch draws random numbers. Raises UsageError if the result of
    `forward_step` cannot be the same under all layouts, or if an error occurs with several processes, but not with one.
    """

    def __init__(self, setup: Setup, checkpoint: Checkpoint, group: CpuGroup, facts: dict[str, Any]):
        self.accelerator, self.plan, self.layout, self.group = setup.accelerator, setup.plan, setup.plan.layout, group
        config, self.first, self.facts = self.plan.config, checkpoint.state.step, facts
        is_wrapped = group.size > 1 or main_strategy(self.layout) is not DDP
        num_steps = config.check_steps if is_wrapped else 0
        self.numbers = range(self.first, min(self.first + num_steps, self.plan.num_steps))
        if setup.may_follow_evaluations:  # the reference does not evaluate
            after = (number + 1 for number in self.numbers if self.plan.evaluates(number + 1))
            self.numbers = range(self.first, next(after, self.numbers.stop))
        self._setup = setup
        self._reference: Reference | None = None  # only the main process has one
        self._rehearsal: Rehearsal | None = None  # only the main process has one
        self._rehearsed: tuple[list[int], list[int]] = [], []  # numbers of its steps, and after how many it evaluates
        self._error: str | None = None  # of one process
        self._block_sizes: dict[int, dict[PlaceInRow, tuple[int, ...]]] = {}  # of each step
        self._seconds = 0.0  # the time that the check took
        is_cut = self.plan.micro_batch_size < config.batch_size
        self._first_pass = FirstPass(draws_for_batches=is_cut and draws_for_batches(setup.train_set))
        self._say_what_was_asked()
        if self.numbers:
            began = time.monotonic()
            self._take_reference(ReferenceRun(setup, checkpoint, self.numbers, self._first_pass))
            self._seconds += time.monotonic() - began
        draws = (self._first_pass.draws or self._first_pass.draws_for_batches) if self.numbers else None
        facts |= {"checked_steps": len(self.numbers), "draws": draws}
        self._observer = Observer(None if self.numbers else self._first_pass)
        with self.translating(True):
            self.engine = prepare(self._observer.watch(setup))
        self._evaluate, self.engine.evaluate = self.engine.evaluate, self.evaluate  # type: ignore[method-assign]
        self.after_saves = AfterSaves(self.engine, group, config.check_every if is_wrapped else 0)

    def _say_what_was_asked(self) -> None:
        """Says where the recipe asked for the number of processes: the check cannot undo what follows from it."""
        asked: dict[str, str] = getattr(self.accelerator, "asked", {})
        if self.group.size > 1 and (place := asked.get("num_processes")):
            self.accelerator.print(
                f"the recipe asks for the number of processes ({place}): if it changes a learning rate, a size or a "
                "loss by it, the result depends on the config; accelerate-recipes verify shows that"
            )
        asked.clear()

    def _take_reference(self, run: ReferenceRun) -> None:
        problem: NotChecked | UsageError | None = None
        device = self.accelerator.device
        if self.accelerator.is_main_process:
            try:
                self._reference = take_reference(run)
                if (lines := not_repeated(self._reference)) is not None:
                    raise UsageError(lines)
                self._first_pass.lost = lost_at_resume(self._reference)
                self._rehearsal = Rehearsal.take(run, self._reference.steps[self.first])
                if self._rehearsal is not None:
                    first = self._first_pass  # the run warns of what depends on the layout, as BatchNorm's averages do
                    may_differ = first.moves or first.written or first.written_in_evaluation or first.mixes
                    self._rehearsed = [*self._rehearsal.steps], [] if may_differ else [*self._rehearsal.evaluated]
                self._block_sizes = {key: step.modules.block_sizes for key, step in self._reference.steps.items()}
            except (NotChecked, UsageError) as reason:
                problem = reason
            except Exception as error:  # the run will show whether only one process fails
                self._error = line_of(error)
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
        given = self.group.broadcast((problem, self._error, self._first_pass, self._block_sizes, self._rehearsed))
        problem, self._error, self._first_pass, self._block_sizes, self._rehearsed = given
        if isinstance(problem, UsageError):
            raise problem
        if problem is not None:
            self.numbers = range(0)
            other = "a config without fp16" if self.layout.precision == "fp16" else "a smaller model"
            line = f"the first steps are not checked against one process ({problem})"
            self.accelerator.print(f"{line}: run accelerate-recipes verify with {other}")
        elif self._error is None:
            self._first_pass.say(self.plan, self.accelerator.print)
            frees = any(each.frees_weights for each in strategies_of(self.layout))
            if frees and (name := self._first_pass.differentiates):
                raise UsageError(
                    f"forward_step differentiates by {name}, which FSDP2 frees in a backward pass: use --config_file "
                    "accelerate_configs/ddp.yaml"
                )

    def take_step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """`Engine.step` with the parity check. An error in a step gets its samples as a note. Raises UsageError if the
        result differs from one process, or if an error occurs only with several processes."""
        ids = lambda: torch.cat(self.plan.own_samples(number)).tolist()  # noqa: E731
        with self.translating(number in self.numbers):
            try:
                with annotate_errors(lambda: f"step {number + 1}, {list_samples(ids())}"):
                    return self._take_step(number, micro_batches, wants_norm)
            except Exception as error:
                if number == self.first and (mixed := mixed_types(error, self.engine.module, micro_batches[0])):
                    raise UsageError(mixed) from None
                raise

    def _take_step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        if number in self.numbers:
            return self._check_step(number, micro_batches)
        if number == self.first:
            return self._observe_step(number, micro_batches)
        is_compared = number in self.after_saves.numbers
        if number in self._rehearsed[0]:
            result = self._rehearse_step(number, micro_batches)
        else:
            result = self.engine.step(number, micro_batches, wants_norm or is_compared)
        if is_compared:
            self.after_saves.compare(number, result)
        return result

    def evaluate(self, batch: Batch, number: int) -> dict[str, Tensor]:
        """`Engine.evaluate`. Raises UsageError if an error occurs only with several processes."""
        with self.translating(number in self.numbers):
            return self._evaluate(batch, number)

    def compare_evaluation(self, number: int, metrics: Metrics) -> None:
        """Raises UsageError in all processes if the evaluation after `number` steps differs from one process."""
        if number in self._rehearsed[1]:
            self._end_with(self._rehearsal and self._rehearsal.line_of_evaluation(metrics, self.layout, number))

    @contextmanager
    def translating(self, is_checked: bool = False) -> Iterator[None]:
        """Turns an exception that one process did not raise, or, in a later pass, one from a package, into one line."""
        try:
            yield
        except (RunError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            in_package = not is_own(traceback.extract_tb(error.__traceback__)[-1].filename)
            of_torch = isinstance(error, (RuntimeError, *[AttributeError, AssertionError] * in_package))
            # Otherwise it is a mistake in the recipe, and the traceback says more.
            may_be_ours = is_checked or (self.group.size > 1 and of_torch)
            if not self.numbers or self._error is not None or needs_no_traceback(error) or not may_be_ours:
                raise
            path = self.plan.config.output_dir / f"traceback_{self.group.rank:05d}.txt"
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            mixed = "; forward_step uses weights, or copies of them, outside model(...)" * ("DTensor" in str(error))
            raise UsageError(
                f"{self.layout} cannot train this: {line_of(error)}{mixed}; one process {'can' * is_checked or 'may'}: "
                f"use {main_strategy(self.layout).fallback}; the traceback is in {path}"
            ) from None

    def _observe_step(self, number: int, micro_batches: Sequence[Batch]) -> StepResult:
        """The first step of a run that is not checked. Prints its side effects."""
        first_pass = self._first_pass
        _, result = self._observer.step(self.engine, number, micro_batches, evaluates="", modules=None)
        if first_pass.draws and self.layout.tp * self.layout.sp > 1:  # stages draw the same numbers outside layers
            raise UsageError(
                f"the forward pass draws random numbers, such as dropout, and {self.layout} divides it: set dropout to "
                f"0, or use {main_strategy(self.layout).fallback}"
            )
        if self.group.size > 1:
            first_pass.written = []  # DDP itself writes buffers
        self.facts["draws"] = first_pass.draws or first_pass.draws_for_batches
        first_pass.say(self.plan, self.accelerator.print)
        return result

    def _check_step(self, number: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Takes a step, and compares it with the same step of one process."""
        engine, sizes = self.engine, self._block_sizes.get(number)
        modules = None if self.plan.config.compile or sizes is None else ModuleTrace(block_sizes=sizes)
        with gradients_of(engine._own_optimizer, lambda: engine.saved_tensors().items()) as gradients:
            first = self._first_pass
            evaluates = "" if first.moves or first.keeps else first.evaluation_at(number, self.numbers)
            own, result = self._observer.step(engine, number, micro_batches, evaluates, modules)
        began = time.monotonic()
        self._compare(number, own, gradients)
        self._seconds += time.monotonic() - began
        if number == self.numbers[-1]:
            engine.replicas.compare_buffers(self.group)
            self.facts["check_seconds"] = round(self._seconds, 3)
            if self._seconds > 1:
                steps = f"{len(self.numbers)} step{'s' * (len(self.numbers) > 1)}"
                self.accelerator.print(f"checked {steps} against one process in {self._seconds:.1f} s")
            self._reference = None  # frees its memory
        return result

    def _rehearse_step(self, number: int, micro_batches: Sequence[Batch]) -> StepResult:
        """A later step of a rehearsal, compared with one process."""
        first = self._first_pass
        evaluates = "after" * (not (first.moves or first.keeps or first.written))
        own, result = self._observer.step(self.engine, number, micro_batches, evaluates, modules=None)
        steps = self.group.all_gather(own)
        self._end_with(self._rehearsal and self._rehearsal.line(steps, self.layout, number))
        return result

    def _end_with(self, line: Any) -> None:
        """Raises UsageError in all processes if the main process has a line."""
        if line := self.group.broadcast(line):
            raise UsageError(line)

    def _compare(self, number: int, own: Step, gradients: dict[str, Tensor]) -> None:
        """Raises UsageError in all processes if step `number` differs from one process."""
        if self._error is not None:
            raise UsageError(
                f"several processes can train this, but not one: {self._error}; call model(...) in forward_step, "
                "and nothing that only a wrapped model or a group of processes has"
            )
        gaps, updates = self._weight_gaps(number)
        own.parts, modules, own.modules = fingerprints(self.engine), own.modules, ModuleTrace()
        steps, reference = self.group.all_gather(own), self._reference
        if reference is not None and math.isfinite(reference.steps[number].grad_norm):
            for rank, step in enumerate(steps):
                others = step_gaps(step, reference.steps[number], rank)
                gaps |= {key: gap for key, gap in others.items() if gap.size > gaps.get(key, Gap(-1.0)).size}
            gaps |= replica_gaps(steps, updates)
            gaps, lines = without_noise(gaps, reference, number)
            for line in lines:
                self.accelerator.print(line)
        else:
            gaps = {}
        if not self.group.broadcast(bool(gaps)):
            return
        traces = self.group.all_gather(modules.on_cpu())
        found = {name: Sketch.of(gradient) for name, gradient in self.engine.each_whole(gradients)}
        ends = ""
        if reference is not None:
            search = FirstDifference(reference, number, self.plan, traces, found, own.grad_norm)
            ends = verdict(gaps, steps, search, self._setup, self._first_pass)
        raise UsageError(self.group.broadcast(ends))

    def _weight_gaps(self, number: int) -> tuple[dict[Key, Gap], dict[str, float]]:
        """A collective: (differences of weights from one process, {name: size of its update}) in the main process."""
        reference, gaps, updates = self._reference, dict[Key, Gap](), dict[str, float]()
        after, before = ({}, {}) if reference is None else (reference.steps[number].weights, reference.initial)
        for name, weight in self.engine.each_whole():
            if reference is not None and name not in self._first_pass.written:
                gaps["weight", name] = weight_gap(name, Sketch.of(weight), after[name], before[name])
                updates[name] = (after[name] - before[name]).norm
        return gaps, updates


def mixed_types(error: Exception, model: nn.Module, batch: Batch) -> str | None:
    """The line for an error because a batch has a different dtype than the weights; None for any other error."""
    if not isinstance(error, RuntimeError) or "type" not in str(error):
        return None
    weights = {weight.dtype: name for name, weight in model.named_parameters() if weight.is_floating_point()}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point() and weights and value.dtype not in weights:
            kind, weight = next(iter(weights.items()))
            kinds = [str(each).removeprefix("torch.") for each in (kind, value.dtype)]
            return (
                f'{line_of(error)}: {weight} is {kinds[0]}, "{name}" of the batch is {kinds[1]}: use '
                f'batch["{name}"].to({kind}) in forward_step, or make the model {kinds[1]}'
            )
    return None
