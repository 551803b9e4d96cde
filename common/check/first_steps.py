"""The first optimizer steps of a run are taken twice: by all processes, and by the main process alone."""

import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checkpoint.resume import Checkpoint, FreshStart
from ..cpu_group import CpuGroup
from ..data.batches import Batch, ForwardStep, MapDataset, draws_for_batches
from ..errors import RunError, UsageError, first_line, line_of, listed, needs_no_traceback
from ..parallel.engine import Engine, StepResult
from ..parallel.guards import check_all_used
from ..parallel.kinds import wrapper_of
from ..parallel.setup import Setup
from .alone import Alone, Step, checksums, on_cpu, recorded_outputs
from .compare import Gap, Key, fingerprints, replica_gaps, step_gaps, weight_gap
from .copies import NotChecked
from .first_pass import FirstPass, evaluated
from .noise import without_noise
from .reference import Reference, take_reference
from .sketch import Sketch
from .verdict import verdict


class FirstSteps:
    """Watches the steps of a run, and checks the first `--check_steps` of them against one process.

    The main process takes these steps alone, before the config wraps or divides the model, with the samples of all
    processes, and restores model and optimizer. Then all take them together and compare: the values of each sample, the
    norm of the gradient, the update of each weight. What differs by more than 1e-5 is compared with the floor: what
    rounding errors in the weights change on one process. A larger difference ends the run before anything is saved.

    Args:
        setup: of the run.
        train_set: with the run's samples.
        checkpoint: that the run starts from. Its weights are loaded, its optimizer state is not.
        group: of all processes.

    Attributes:
        facts: for the run card: how many steps are checked, and how long that took; whether the forward pass or a batch
            draws random numbers.

    Raises:
        UsageError: `forward_step` does not call the model.
    """

    def __init__(
        self,
        setup: Setup,
        train_set: MapDataset,
        checkpoint: Checkpoint | FreshStart,
        group: CpuGroup,
    ):
        self.accelerator, self.plan, self.layout, self.group = setup.accelerator, setup.plan, setup.plan.layout, group
        config, self.first = self.plan.config, checkpoint.state.step
        self.numbers = range(self.first, min(self.first + config.check_steps, self.plan.num_steps))
        self._reference: Reference | None = None  # only the main process has one
        self._error: str | None = None  # of one process
        self._rounding: dict[str, Sketch] = {}
        self._at: int | None = None  # the step that the run is in
        self._own: Step | None = None  # what the first step that the run is in has done so far
        self._hooks = ExitStack()
        self._seconds = 0.0  # that the check took
        is_cut = self.plan.micro_batch_size < config.batch_size
        self._first_pass = FirstPass(draws_for_batches=is_cut and draws_for_batches(train_set))
        alone = Alone(setup, train_set, checkpoint.state.num_skipped, self._first_pass)
        if group.size == 1:
            self.numbers = range(0)
        if self.numbers:
            with self._timed():
                self._take_alone(alone, checkpoint)
        self.facts: dict[str, Any] = {
            "checked_steps": len(self.numbers),
            "draws": self._draws if self.numbers else None,
        }

    def _take_alone(self, alone: Alone, checkpoint: Checkpoint | FreshStart) -> None:
        problem: type[Exception] | None = None
        text, device = "", self.accelerator.device
        if self.accelerator.is_main_process:
            try:
                self._reference = take_reference(alone, checkpoint, self.numbers)
            except (NotChecked, UsageError) as reason:
                problem, text = NotChecked if isinstance(reason, NotChecked) else UsageError, str(reason)
            except Exception as error:  # the run will show whether only one process fails
                problem, text = Exception, f"{type(error).__name__}: {first_line(error)}"
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
        problem, text, self._first_pass = self.group.broadcast((problem, text, self._first_pass))
        if problem is UsageError:
            raise UsageError(text)
        if problem is NotChecked:
            self.numbers = range(0)
            self.accelerator.print(
                f"the first steps are not checked against one process ({text}): accelerate-recipes verify checks a "
                "smaller model"
            )
        elif problem is None:
            self._first_pass.say(self.plan, self.accelerator.print)
        else:
            self._error = text

    @property
    def _draws(self) -> bool:
        return self._first_pass.draws or self._first_pass.draws_for_batches

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Adds the step and its samples to an error in a step; in a first step, ends the run with one line instead if
        one process alone had none."""
        if self._at is None or not isinstance(error, Exception) or isinstance(error, RunError):
            return
        samples = torch.cat(self.plan.own_samples(self._at)).tolist()
        error.add_note(f"step {self._at + 1}, {listed(samples)}")
        if self._at in self.numbers:
            self._translate(error)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turns an exception in the `with` block into one line if one process alone had none."""
        try:
            yield
        except Exception as error:
            self._translate(error)
            raise

    def _translate(self, error: Exception) -> None:
        """Raises UsageError for an error of several processes that one process alone did not have."""
        if isinstance(error, RunError | OSError | MemoryError | torch.OutOfMemoryError):
            return
        if not self.numbers or self._error is not None or needs_no_traceback(error):
            return
        path = self.plan.config.output_dir / f"traceback_{self.group.rank:05d}.txt"
        path.write_text("".join(traceback.format_exception(error)))
        raise UsageError(
            f"{self.layout} cannot train this: {line_of(error)}; one "
            f"process can: type {wrapper_of(self.layout).elsewhere}; the traceback is in {path}"
        ) from None

    def checks(self, number: int) -> bool:
        """Whether step `number` is compared with one process."""
        return number in self.numbers

    def watching(self, setup: Setup) -> Setup:
        """The setup, with a `forward_step` whose calls this object can note."""

        def watched(forward_step: ForwardStep) -> ForwardStep:
            def step(model: Any, batch: Batch) -> dict[str, Tensor]:
                return forward_step(model, batch) if self._own is None else self._noted(forward_step, model, batch)

            return step

        return replace(setup, watched=watched)

    def before(self, engine: Engine, number: int, micro_batches: Sequence[Batch]) -> None:
        """To be called before a step of the engine. In the first steps, what it does is noted."""
        self._at = number
        if number not in self.numbers and number != self.first:
            return
        own, compiles = Step(), self.plan.config.compile
        self._engine, self._micro_batches = engine, micro_batches
        if number == self.first and number in self.numbers:
            self._note_rounding(engine)
            values = evaluated(engine.model, engine.forward_step, micro_batches[0])
            if self.plan.row(0) == 0:
                own.evaluated[0] = on_cpu(values)
            if self.accelerator.is_main_process and not compiles:
                self._hooks.enter_context(recorded_outputs(engine.module, own.outputs))
        elif number == self.first and not compiles:
            self._hooks.enter_context(self._first_pass.watched_layers(engine.module, self.accelerator.device))
        self._own = own

    def _noted(self, forward_step: ForwardStep, model: Any, batch: Batch) -> dict[str, Tensor]:
        """A call of `forward_step` in a first step. A pipeline also calls it for the arguments of the model alone."""
        own, engine, device = self._own, self._engine, self.accelerator.device
        assert own is not None
        index = next(index for index, other in enumerate(self._micro_batches) if other is batch)
        is_first = self._at not in self.numbers and not own.samples and isinstance(model, nn.Module)
        with self._first_pass.watched(model, engine.module, device) if is_first else nullcontext():
            values = forward_step(model, batch)
        own.samples[self.plan.row(index)] = checksums(batch) if self._at in self.numbers else {}
        if not torch.is_grad_enabled():
            return values
        if self._at in self.numbers:
            own.values[self.plan.row(index)] = on_cpu(values)
        share = engine.shares[index] if engine.shares else None
        if share is not None:
            share.check_same(values)
        if self.layout.needs_all_weights:
            names = ["loss"] if engine.batch_loss is None else list(values if share is None else share.gradients)
            check_all_used(engine.module, [values[name] for name in names], self.accelerator.process_index)
        return values

    def after(self, engine: Engine, number: int, result: StepResult) -> None:
        """To be called after a step of the engine.

        Raises:
            UsageError: the result is not that of one process.
        """
        self._at, own, self._own = None, self._own, None
        if own is None:
            return
        self._hooks.close()
        if number not in self.numbers:
            self._say_what_it_did()
            return
        for index, share in enumerate(engine.shares):
            own.values[self.plan.row(index)] |= on_cpu(share.metrics)
        own.grad_norm = math.nan if result.grad_norm is None else float(result.grad_norm)
        with self._timed():
            self._compare(engine, number, own)
        if number == self.numbers[-1]:
            self._finish()

    def _say_what_it_did(self) -> None:
        """Prints what the first step of a run that is not checked did beside computing values."""
        first_pass = self._first_pass
        if first_pass.draws and self.layout.num_sharing > 1:
            raise UsageError(
                f"the forward pass draws random numbers, as dropout does, and {self.layout} divides it: set dropout to "
                f"0, or type {wrapper_of(self.layout).elsewhere}"
            )
        if self.group.size > 1:
            first_pass.written = []  # DDP itself writes buffers
        self.facts["draws"] = self._draws
        first_pass.say(self.plan, self.accelerator.print)

    def _note_rounding(self, engine: Engine) -> None:
        """Notes what wrapping did to the weights before the first step: DeepSpeed rounds them in bf16."""
        if not engine.rounds_weights:
            return
        initial = {} if self._reference is None else self._reference.initial
        for name, weight in engine.each_full_weight():
            if name in initial:
                self._rounding[name] = Sketch.of(weight) - initial[name]

    def _compare(self, engine: Engine, number: int, own: Step) -> None:
        """Raises UsageError in all processes if step `number` is not that of one process."""
        if self._error is not None:
            raise UsageError(
                f"one process alone cannot train this, several can: {self._error}; call model(...) in forward_step, "
                "and nothing that only a wrapped model has"
            )
        reference, first_pass, gaps, updates = self._reference, self._first_pass, dict[Key, Gap](), dict[str, float]()
        after, before = ({}, {}) if reference is None else (reference.steps[number].weights, reference.initial)
        for name, weight in engine.each_full_weight():
            if reference is not None and name not in first_pass.written:
                here = Sketch.of(weight)
                here = here - self._rounding[name] if name in self._rounding else here
                gaps["weight", name] = weight_gap(name, here, after[name], before[name])
                updates[name] = (after[name] - before[name]).norm
        own.parts = fingerprints(engine)
        steps, lines = self.group.all_gather(own), None
        if reference is not None and math.isfinite(reference.steps[number].grad_norm):
            for rank, step in enumerate(steps):
                others = step_gaps(step, reference.steps[number], self.plan, number, rank)
                gaps |= {key: gap for key, gap in others.items() if gap.size > gaps.get(key, Gap(-1.0)).size}
            gaps |= replica_gaps(steps, updates)
            with _untouched(engine.module):
                gaps = without_noise(gaps, reference, number)
            lines = verdict(gaps, number, steps, reference, first_pass) if gaps else None
        lines = self.group.broadcast(lines)
        if lines is not None:
            raise UsageError(lines)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds += time.monotonic() - started

    def _finish(self) -> None:
        self.facts["check_seconds"] = round(self._seconds, 3)
        if self._seconds > 1:
            steps = f"{len(self.numbers)} step{'s' * (len(self.numbers) > 1)}"
            self.accelerator.print(f"checked {steps} against one process in {self._seconds:.1f} s")
        self._reference = None  # frees its memory


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Raises RuntimeError if the `with` block calls the module: in one process alone, a divided layer would wait."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("forward_step calls a model from outside")

    hooks = [layer.register_forward_pre_hook(refuse, prepend=True) for layer in module.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
