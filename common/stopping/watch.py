"""Stops a run on a signal, a non-finite number or a hang."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator

from ..accidents import advice
from ..cpu_group import CpuGroup
from ..errors import DriftError, NonFiniteError, RunError, StoppedError, UsageError, is_out_of_memory, list_samples
from ..failure import first_failure
from ..plan import Plan, next_smaller_divisor
from ..step.engine import StepResult
from . import signals
from .watchdog import Watchdog

RAISED_BY_ALL = (StoppedError, NonFiniteError, DriftError)  # in all processes at the same step
MAX_SKIPS_IN_ROW = 40  # by then a loss scale of 2^16 has fallen to 2^-24


class Watch:
    """Makes all processes agree, after each step, on whether to continue.

    An all-reduce counts the processes with a stop request and the processes with a non-finite number. The counts are
    read one step late, so that no step waits for them; with several GPUs two steps late, because a step's numbers
    arrive on the CPU a step later. A norm of the gradient that is on the CPU is read at once. `stop_requested`, whether
    a process received a signal, is the same in all processes.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan, group: CpuGroup):
        self.plan, self.group, self.stop_requested = plan, group, False
        self._device = accelerator.device
        self._delay = 2 if accelerator.device.type != "cpu" and group.size > 1 else 1
        self._pending: list[_Pending] = []
        self._results: dict[int, StepResult] = {}
        self._skips_in_row = 0
        self._watchdog = Watchdog(group, plan.config.output_dir, plan.config.hang_timeout)
        self.progress, self.save = self._watchdog.progress, self._watchdog.save

    def __enter__(self) -> Self:
        signals.catch()  # before this, a signal ended the process: there was nothing to save
        self._watchdog.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        by_agreement = error is None or isinstance(error, RAISED_BY_ALL)
        line = None if error is None else advice_for(error, self.plan)
        ending = error if line is None else UsageError(line)
        if ending is not None:
            first_failure(ending)  # before others learn of it: their later errors are not the cause
        self._watchdog.stop(failed=not by_agreement)
        if ending is None:  # after an error, a signal must not end the process before it has reported the error
            signals.release()
        elif ending is not error:
            raise ending from None

    def after_step(self, step: int, result: StepResult) -> None:
        """Checks the numbers of optimizer step `step`, counted from 1, and polls for a stop request. Raises
        NonFiniteError if a loss or gradient norm of this step, or of the one or two before it, is not finite in any
        process; the current step is checked at once if it is recorded, evaluated or saved."""
        self._results = {number: kept for number, kept in self._results.items() if number >= step - self._delay}
        self._results[step] = result
        self._skips_in_row = self._skips_in_row + 1 if result.skipped else 0
        if self._skips_in_row >= MAX_SKIPS_IN_ROW:
            raise NonFiniteError(
                f"gradients were not finite in {MAX_SKIPS_IN_ROW} steps in a row up to step {step}, with ever "
                "smaller loss scales: use --mixed_precision bf16 after accelerate launch, or a lower --learning_rate"
            )
        self._start_poll(step, result)
        norm = None if result.skipped else result.grad_norm  # the same in all processes
        is_on_cpu = not isinstance(norm, torch.Tensor) or norm.device.type == "cpu"
        if self.stop_requested or self.plan.reads(step) or (norm is not None and is_on_cpu and not math.isfinite(norm)):
            self.settle()

    def poll(self) -> bool:
        """Polls for a stop request during long work outside steps, such as evaluation. Returns whether an earlier poll
        found one: each answer is read one or two polls late. Collective."""
        self._start_poll()
        return self.stop_requested

    def _start_poll(self, step: int | None = None, result: StepResult | None = None) -> None:
        self.progress()
        while len(self._pending) >= self._delay:
            self._read_oldest()
        for pending in self._pending:
            pending.start()
        given = [] if result is None or result.skipped else [*result.losses, result.grad_norm]
        values = [value for value in given if value is not None]
        self._pending.append(_Pending(step, signals.received_signal() is not None, values, self.group, self._device))

    def settle(self) -> None:
        """Waits for the answers to all polls. Raises NonFiniteError like `after_step`."""
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        pending = self._pending.pop(0)
        num_stopping, num_not_finite = pending.read()
        if num_not_finite:
            assert pending.step is not None  # only a poll after a step has numbers
            raise NonFiniteError(self._describe(pending.step))
        self.stop_requested = self.stop_requested or num_stopping > 0

    def raise_stopped(self, checkpoint: Path | None) -> None:
        """Raises StoppedError, with the flag to resume; RunError if there is no checkpoint."""
        name = next(name for name in self.group.all_gather(signals.received_signal()) if name)
        if checkpoint is None:
            raise RunError(f"by {name}, and this step could not be saved")
        raise StoppedError(f"by {name}: {checkpoint} is saved, use --resume_from_checkpoint latest to continue")

    def _describe(self, step: int) -> str:
        """The error message: the number that is not finite, its process and its samples."""
        result, own = self._results[step], None
        ids = self.plan.own_samples(step - 1)
        for loss, batch in zip(result.losses, ids):
            if own is None and not math.isfinite(loss):
                own = ("train/loss", float(loss), batch.tolist())
        if losses := [(rank, *loss) for rank, loss in enumerate(self.group.all_gather(own)) if loss is not None]:
            rank, name, value, samples = losses[0]
            where = f" in process {rank}, {list_samples(samples)}"
        else:
            first = [int(batch[0]) for batch in self.group.all_gather(ids[0])]
            assert result.grad_norm is not None
            name, value = "grad_norm", float(result.grad_norm)
            where = f" (all losses are finite; the first sample of each process: {', '.join(map(str, first))})"
        advice = "try a lower --learning_rate" if step > 1 else "check the model's weights: no step has changed them"
        return f"{name} is {value} at step {step}{where}: {advice}, or look at these samples"


def advice_for(error: BaseException, plan: Plan) -> str | None:
    """The line to show instead of the traceback of an error that a flag can prevent; None for any other error."""
    text = str(error)
    if is_out_of_memory(error):
        amount = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        size = plan.micro_batch_size
        smaller = next_smaller_divisor(size * plan.accumulation, size)
        example = ", for example with accelerate_configs/fsdp2.yaml" if plan.layout.dp_shard == 1 else ""
        sharded = f"shard the model over more GPUs{example}"
        choices = sharded if smaller is None else f"use --micro_batch_size {smaller}, or {sharded}"
        what = f"{size} sample{'s' * (size > 1)} per forward pass"
        return f"out of memory with {what}{f', {amount[1]} more' if amount else ''}: {choices}"
    if plan.config.deterministic and "does not have a deterministic implementation" in text:
        return f"--deterministic: {text.partition(' does not')[0]} has no deterministic kernel: remove that flag"
    return advice(error)


class _Pending:
    """Counts that are not read yet: processes with a stop request, processes with a non-finite number."""

    def __init__(
        self, step: int | None, stops: bool, values: list[torch.Tensor | float], group: CpuGroup, device: torch.device
    ):
        self.step, self._stops, self._group = step, stops, group
        self._event: torch.Event | None = None
        self._counts: Callable[[], list[float]] | None = None
        if device.type != "cpu" and values:
            finite = torch.stack([torch.as_tensor(value, device=device).float() for value in values]).isfinite().all()
            self._is_finite: torch.Tensor | bool = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._is_finite.copy_(finite, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record()
        else:
            self._is_finite = all(math.isfinite(value) for value in values)
            self.start()

    def start(self) -> None:
        """Starts the sum over processes, once the numbers are on the CPU. All processes use the same order."""
        if self._counts is None:
            if self._event is not None:
                self._event.synchronize()
            self._counts = self._group.sum_async([float(self._stops), float(not self._is_finite)])

    def read(self) -> list[float]:
        """[processes with a stop request, processes with a non-finite number]"""
        self.start()
        assert self._counts is not None
        return self._counts()
