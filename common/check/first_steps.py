"""The first optimizer steps of a run are taken twice: by all processes, and by the main process alone."""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..checkpoint.resume import Checkpoint, FreshStart
from ..cpu_group import CpuGroup
from ..data.batches import Batch, ForwardStep, MapDataset, draws_for_batches
from ..errors import RunError, UsageError, first_line, needs_no_traceback
from ..layout import Kind
from ..parallel.parts import kept_tensors, parts_of
from ..parallel.trainer import StepResult, Trainer
from ..plan import Plan
from .alone import (
    Alone,
    NotChecked,
    Step,
    checksums,
    kept_optimizer,
    move_by_rounding,
    on_cpu,
    recorded_outputs,
    twins,
)
from .compare import (
    TIMES_FLOOR,
    TOLERANCE,
    Gap,
    Key,
    exact,
    first_other_layer,
    likely_cause,
    norm_gap,
    replica_gaps,
    value_gaps,
    weight_gap,
)
from .first_pass import FirstPass, evaluated

ROUNDINGS = (1, 2, 4, 8)  # rounding errors by which the weights are moved, until the differences are explained


class FirstSteps:
    """Takes the steps of a run, and checks the first `--check_steps` of them against one process.

    The main process takes these steps alone, before the config wraps or divides the model, with the samples of all
    processes, and restores model and optimizer. Then all take them together and compare: the values of each sample, the
    norm of the gradient, the update of each weight. What differs by more than 1e-5 is compared with the floor: what
    rounding errors in the weights change on one process. A larger difference ends the run before anything is saved.

    Args:
        accelerator: from `start(config)`.
        model: the recipe's module, before `prepare`.
        optimizer: over its weights.
        forward_step: as for `fit`.
        train_set: with the run's samples.
        plan: of the run.
        checkpoint: that the run starts from. Its weights are loaded, its optimizer state is not.
        group: of all processes.
        is_stopping: whether a signal asks this process to stop.

    Attributes:
        facts: for the run card: how many steps are checked; whether the forward pass or a batch draws random numbers.

    Raises:
        UsageError: `forward_step` does not call the model.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        forward_step: ForwardStep,
        train_set: MapDataset,
        plan: Plan,
        checkpoint: Checkpoint | FreshStart,
        group: CpuGroup,
        is_stopping: Callable[[], bool],
    ):
        self.accelerator, self.plan, self.group = accelerator, plan, group
        self.layout = plan.layout
        self.first, self.numbers = checkpoint.state.step, range(0)
        self.facts: dict[str, Any] = {"checked_steps": 0, "draws": None}
        self._error: str | None = None
        self._steps: list[Step] = []
        self._seconds = 0.0  # that the check took
        is_cut = plan.micro_batch_size < plan.config.batch_size
        self._first_pass = FirstPass(draws_for_batches=is_cut and draws_for_batches(train_set))
        self._alone = Alone(
            accelerator, forward_step, train_set, plan, checkpoint.state.num_skipped, is_stopping, self._first_pass
        )
        wanted = range(self.first, min(self.first + plan.config.check_steps, plan.num_steps))
        if group.size > 1 and wanted:
            with self._timed():
                self._take_alone(model, optimizer, wanted, checkpoint)

    def _take_alone(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        numbers: range,
        checkpoint: Checkpoint | FreshStart,
    ) -> None:
        why, error, refusal = "", "", ""
        if self.accelerator.is_main_process:
            try:
                self._check_possible(model)
                with kept_optimizer(model, optimizer):
                    checkpoint.load_optimizer(model, optimizer)
                    self._twins = self._copied(model, optimizer)
                    self._steps = self._alone.steps(model, optimizer, numbers)
                self._say_what_depends()
            except NotChecked as reason:
                why = str(reason)
            except UsageError as mistake:
                refusal = str(mistake)
            except (torch.OutOfMemoryError, MemoryError):
                why = "one device has too little memory for the whole model"
            except Exception as failure:  # the run will show whether only one process fails
                error = f"{type(failure).__name__}: {first_line(failure)}"
            if self.accelerator.device.type != "cpu":
                torch.get_device_module(self.accelerator.device).empty_cache()
        why, error, refusal, self._first_pass = self.group.broadcast((why, error, refusal, self._first_pass))
        if refusal:
            raise UsageError(refusal)
        self._error = error or None
        self.numbers = range(0) if why else numbers
        self.facts |= {"checked_steps": len(self.numbers), "draws": self._draws}
        if why:
            self.accelerator.print(
                f"the first steps are not checked against one process ({why}): accelerate-recipes verify checks a "
                "smaller model"
            )

    def _copied(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        try:
            return twins(model, optimizer)
        except Exception as failure:
            raise NotChecked(f"they cannot be copied: {first_line(failure)}") from None

    def _check_possible(self, model: nn.Module) -> None:
        """Raises NotChecked for fp16 and for a model that leaves no room for the copies."""
        if self.layout.precision == "fp16":
            raise NotChecked("fp16 skips steps")
        num_bytes, device = sum(weight.nbytes for weight in model.parameters()), self.accelerator.device
        # Weights, gradients and two slots of an optimizer; beside them a copy of the weights, and all after each step.
        room = psutil.virtual_memory().available
        num_loaded = 4 if self.first > 0 else 0  # the optimizer state of a checkpoint, twice
        needed = num_bytes * (1 + num_loaded + self.plan.config.check_steps + (4 if device.type == "cpu" else 0))
        on_device = math.inf if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]
        if needed > room or 4 * num_bytes > on_device:
            raise NotChecked(f"{4 * num_bytes / 2**30:.3g} GiB for the whole model on one device are too much")

    @property
    def _draws(self) -> bool:
        return self._first_pass.draws or self._first_pass.draws_for_batches

    def _say_what_depends(self) -> None:
        self._first_pass.say(self.plan, self.accelerator.print)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turns an exception in the `with` block into one line if one process alone had none."""
        try:
            yield
        except (RunError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self.numbers or self._error is not None or needs_no_traceback(error):
                raise
            path = self.plan.config.output_dir / f"traceback_{self.group.rank:05d}.txt"
            path.write_text(traceback.format_exc())
            raise UsageError(
                f"{self.layout} cannot train this: {type(error).__name__}: {first_line(error)}{_place(error)}; one "
                f"process can: type {self._other_config}; the traceback is in {path}"
            ) from None

    @property
    def _other_config(self) -> str:
        if self.layout.kind == Kind.PIPELINE:
            return "--config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"
        return f"--config_file accelerate_configs/{'single' if self.layout.kind == Kind.DDP else 'ddp'}.yaml"

    def step(self, trainer: Trainer, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """`Trainer.step`, with the check if it is one of the first steps.

        Raises:
            UsageError: the result is not that of one process, or only several processes fail.
        """
        if number in self.numbers:
            return self._checked(trainer, number, micro_batches)
        if number == self.first:
            return self._watched(trainer, number, micro_batches, wants_norm)
        return trainer.step(number, micro_batches, wants_norm)

    def _watched(self, trainer: Trainer, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """The first step of a run that is not checked: only its first forward pass is watched."""
        first_pass, forward_step = self._first_pass, trainer.forward_step

        def watched(model: Any, batch: Batch) -> dict[str, Tensor]:
            trainer.forward_step = forward_step
            if not isinstance(model, nn.Module):  # what a pipeline passes in its place
                return forward_step(model, batch)
            with first_pass.watched(model, trainer.module):
                return forward_step(model, batch)

        trainer.forward_step = watched
        result = trainer.step(number, micro_batches, wants_norm)
        trainer.forward_step = forward_step
        first_pass.draws = bool(trainer.draws)
        if first_pass.draws and self.layout.divides_layers:
            raise UsageError(
                f"the forward pass draws random numbers, as dropout does, and {self.layout} divides it: set dropout to "
                f"0, or type {self._other_config}"
            )
        if self.group.size > 1:
            first_pass.written = []  # DDP itself writes buffers
        self.facts["draws"] = self._draws
        self._say_what_depends()
        return result

    def _checked(self, trainer: Trainer, number: int, micro_batches: Sequence[Batch]) -> StepResult:
        own, forward_step = Step(), trainer.forward_step
        for index, batch in enumerate(micro_batches):
            own.samples[self.plan.row(index)] = checksums(batch)

        def recorded(model: Any, batch: Batch) -> dict[str, Tensor]:
            values = forward_step(model, batch)
            if torch.is_grad_enabled():  # a pipeline also asks for the arguments of the model
                index = next(index for index, other in enumerate(micro_batches) if other is batch)
                own.values[self.plan.row(index)] = on_cpu(values)
            return values

        if number == self.first:
            self._note_rounding(trainer)
        with ExitStack() as entered:
            entered.enter_context(self.translated())
            if number == self.first:
                values = evaluated(trainer.model, forward_step, micro_batches[0])
                if self.plan.row(0) == 0:
                    own.evaluated[0] = on_cpu(values)
                if self.accelerator.is_main_process and not self.plan.config.compile:
                    entered.enter_context(recorded_outputs(trainer.module, own.outputs))
            trainer.forward_step = recorded
            result = trainer.step(number, micro_batches, wants_norm=True)
        trainer.forward_step = forward_step
        own.grad_norm = math.nan if result.grad_norm is None else float(result.grad_norm)
        with self._timed():
            self._compare(trainer, number, own)
        if number == self.numbers[-1]:
            self._finish()
        return result

    def _note_rounding(self, trainer: Trainer) -> None:
        """Notes what DeepSpeed does to the weights before the first step: in bf16 it rounds them."""
        self._rounding: dict[str, Tensor] = {}
        if self.layout.precision == "float32" or self.layout.kind != Kind.DEEPSPEED:
            return
        initial = kept_tensors(self._twins[0]) if self.accelerator.is_main_process else {}
        for name, weight in trainer.each_full_weight():
            if name in initial:
                self._rounding[name] = exact(weight) - exact(initial[name])

    def _compare(self, trainer: Trainer, number: int, own: Step) -> None:
        """Raises UsageError in all processes if step `number` is not that of one process."""
        if self._error is not None:
            raise UsageError(
                f"one process alone cannot train this, several can: {self._error}; call model(...) in forward_step, "
                "and nothing that only a wrapped model has"
            )
        is_main, gaps = self.accelerator.is_main_process, dict[Key, Gap]()
        alone = self._steps[number - self.first] if is_main else Step()
        initial = kept_tensors(self._twins[0]) if is_main else {}
        updates: dict[str, float] = {}
        for name, weight in trainer.each_full_weight():
            if is_main and name not in self._first_pass.written:
                own_weight = exact(weight) - self._rounding[name] if name in self._rounding else weight
                gaps["weight", name] = weight_gap(name, own_weight, alone.weights[name], initial[name])
                updates[name] = float((exact(alone.weights[name]) - exact(initial[name])).norm())
        others = self.group.all_gather((own.values, own.evaluated, own.samples, own.grad_norm, _fingerprints(trainer)))
        verdict = None
        if is_main and math.isfinite(alone.grad_norm):
            for rank, (values, in_evaluation, _, norm, _) in enumerate(others):
                found = value_gaps(Step(values, in_evaluation), alone, self.plan, number, rank) | {
                    ("norm", ""): norm_gap(norm, alone.grad_norm)
                }
                gaps |= {key: gap for key, gap in found.items() if gap.size > gaps.get(key, Gap(-1.0)).size}
            gaps |= replica_gaps([fingerprints for *_, fingerprints in others], updates)
            with _untouched(trainer.module):
                gaps = self._without_noise(gaps, number)
            verdict = self._verdict(gaps, number, own, [samples for _, _, samples, *_ in others]) if gaps else None
        verdict = self.group.broadcast(verdict)
        if verdict is not None:
            raise UsageError(verdict)

    def _without_noise(self, gaps: dict[Key, Gap], number: int) -> dict[Key, Gap]:
        """The differences that rounding errors do not explain."""
        is_low = self.layout.precision != "float32"
        if is_low:  # a metric such as an accuracy jumps with the rounding
            gaps = {key: gap for key, gap in gaps.items() if key[0] not in ("value", "eval") or key[1] == "loss"}
        gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TOLERANCE}
        if not gaps:
            return gaps
        numbers, alone = range(self.first, number + 1), replace(self._alone, first_pass=None)
        try:
            base = alone.steps(*self._twins, numbers)[-1]
            again = value_gaps(base, self._steps[number - self.first], self.plan, number)
            if any(gap.size > TOLERANCE for gap in again.values()):  # it has a generator or a counter of its own
                return gaps
            initial = kept_tensors(self._twins[0])
            for roundings in ROUNDINGS:
                moved, optimizer = twins(*self._twins)
                move_by_rounding(moved, roundings, is_low)
                other = alone.steps(moved, optimizer, numbers)[-1]
                floor = value_gaps(other, base, self.plan, number) | {
                    ("norm", ""): norm_gap(other.grad_norm, base.grad_norm)
                }
                start = kept_tensors(moved)
                for name, weight in other.weights.items():
                    update = exact(weight) - exact(start[name]) + exact(initial[name])
                    gap = weight_gap(name, update, base.weights[name], initial[name])
                    floor["weight", name] = floor["replica", name] = gap
                gaps = {key: gap for key, gap in gaps.items() if not gap.size <= TIMES_FLOOR * floor[key].size}
                if not gaps:
                    break
        except Exception:  # such as too little time or memory, or a closure over the weights: the floor stays unknown
            pass
        return gaps

    def _verdict(
        self, gaps: dict[Key, Gap], number: int, own: Step, samples: list[dict[int, dict[str, list[int]]]]
    ) -> str:
        """The lines that end the run."""
        order = ("value", "eval", "norm", "weight", "replica")
        first = min(gaps, key=lambda key: (order.index(key[0]), key != ("value", "loss")))
        lines = [f"{self.layout} does not give the result of one process: in step {number + 1}, {gaps[first].text}"]
        alone, model = self._steps[number - self.first], self._twins[0]
        layer = first_other_layer(own.outputs, alone.outputs, model) if first[0] == "value" else None
        if layer is not None:
            lines.append(f"  the first layer whose output differs is {layer}")
        optimizer = type(self._twins[1]).__name__
        cause = likely_cause(
            gaps,
            number == self.first,
            self._other_sample(number, samples),
            self._first_pass,
            self.layout.kind,
            optimizer,
        )
        lines.append(f"  likely cause: {cause}")
        lines.append("  --check_steps 0 trains without this check")
        return "\n".join(lines)

    def _other_sample(self, number: int, samples: list[dict[int, dict[str, list[int]]]]) -> str | None:
        """Names a sample whose content differs between a process and the main process alone; None if there is none."""
        ids = [ids.tolist() for _, ids in self.plan.global_micro_batches(number)]
        for rows in samples:
            for row, batch in rows.items():
                for name, sums in batch.items():
                    for at, (found, expected) in enumerate(
                        zip(sums, self._steps[number - self.first].samples[row].get(name, []))
                    ):
                        if found != expected:
                            return f'"{name}" of sample {ids[row][at]}'
        return None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds += time.monotonic() - started

    def _finish(self) -> None:
        if self._seconds > 1:
            steps = f"{len(self.numbers)} step{'s' * (len(self.numbers) > 1)}"
            self.accelerator.print(f"checked {steps} against one process in {self._seconds:.1f} s")
        self._steps, self._twins = [], None  # type: ignore[assignment]  # frees their memory


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


def _place(error: Exception) -> str:
    """Where the user's code raised it or called what did, for the message."""
    ours = Path(__file__).parents[1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(ours)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _fingerprints(trainer: Trainer) -> dict[Any, tuple[float, float]]:
    """{(name of a weight, range): (sum, norm) of this process's part}, to compare with processes that hold the same."""
    found: dict[Any, tuple[float, float]] = {}
    for name, tensor in trainer.saved_tensors().items():
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():  # buffers may differ
            for part in parts_of(name, tensor):
                value = part.get().detach().double()
                found[name, part.offsets, part.sizes] = (float(value.sum()), float(value.norm()))
    return found
