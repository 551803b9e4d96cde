"""What may stop a run: signals, numbers that are not finite, processes that hang."""

import faulthandler
import json
import math
import re
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import distributed as dist

from common import signals
from common.errors import HangError, NonFiniteError, RunError, StoppedError, first_failure
from common.group import CpuGroup
from common.output_dir import write_failure
from common.plan import Plan
from common.run import end, report
from common.step import StepResult

MAX_SKIPS_IN_ROW = 40  # a loss scale that began at 2^16 is 2^-24 by then
MAX_IDS_NAMED = 8
ANSWER_S = 3.0  # how long a process that hangs waits for what the others say


class Watch:
    """Lets all processes agree, once a step, on whether to go on.

    After each step they add up a small vector, how many want to stop and how many have met a number
    that is not finite. It is read one step late, so that no step waits for it.

    Attributes:
        stops: all processes know that one of them got a signal.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan, group: CpuGroup):
        self.plan, self.group, self.stops = plan, group, False
        self._on_gpu = accelerator.device.type != "cpu"
        self._pending: _Pending | None = None
        self._results: dict[int, StepResult] = {}
        self._skips_in_row = 0
        self._hangs = _HangWatch(plan, group)

    def __enter__(self) -> Self:
        signals.catch()  # until here one ended the process: there was nothing to save
        self._hangs.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hangs.stop()
        if error is None:  # else the process is about to end, and a signal to all must not end it before
            signals.release()

    def step(self, step: int, result: StepResult) -> None:
        """After optimizer step `step` (counted from 0).

        Raises:
            NonFiniteError: a loss or gradient norm of this step, or of the one before it, is infinite
                or not a number, in any process; of this one wherever the plan reads or keeps what
                it gave.
        """
        self._results = {number: kept for number, kept in self._results.items() if number == step - 1}
        self._results[step] = result
        self._skips_in_row = self._skips_in_row + 1 if result.skipped else 0
        if self._skips_in_row >= MAX_SKIPS_IN_ROW:
            raise NonFiniteError(
                f"gradients were not finite in {MAX_SKIPS_IN_ROW} steps in a row up to step {step + 1}, however small "
                "the loss scale: type --mixed_precision bf16 after accelerate launch, or a lower --learning_rate"
            )
        self.pulse(step, result)
        if self.stops or self.plan.reads(step):
            self.settle()

    def progress(self) -> None:
        """Tells the watch for hangs that this process has come further."""
        self._hangs.progress()

    def pulse(self, step: int | None = None, result: StepResult | None = None) -> bool:
        """Also after what is not a step and takes long. Returns `stops`."""
        self.progress()
        self.settle()
        given = [] if result is None or result.skipped else [*result.losses, result.grad_norm]
        values = [value for value in given if value is not None]
        self._pending = _Pending(step, signals.received() is not None, values, self.group, self._on_gpu)
        return self.stops

    def settle(self) -> None:
        """Reads what the processes have added up last, and waits for it. Raises NonFiniteError as `step`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        num_stopping, num_not_finite = pending.read()
        if num_not_finite:
            assert pending.step is not None  # nothing else has numbers
            raise NonFiniteError(self._describe(pending.step))
        self.stops = self.stops or num_stopping > 0

    def stop(self, checkpoint: Path | None) -> None:
        """Raises StoppedError, with what to type to go on; RunError if there is no checkpoint to go on from."""
        name = next(name for name in self.group.all_gather(signals.received()) if name)
        if checkpoint is None:
            raise RunError(f"by {name}, and this step could not be saved")
        raise StoppedError(f"by {name}: {checkpoint} is saved, type --resume_from_checkpoint latest to go on")

    def _describe(self, step: int) -> str:
        """Which number of which process, and from which samples."""
        result, found = self._results[step], None
        ids = list(islice(self.plan.micro_batches(step), self.plan.accumulation))
        for loss, batch in zip(result.losses, ids):
            if found is None and not math.isfinite(loss):
                found = ("train/loss", float(loss), batch.tolist())
        losses = [(rank, *one) for rank, one in enumerate(self.group.all_gather(found)) if one is not None]
        if losses:
            rank, name, value, samples = losses[0]
            named = ", ".join(map(str, samples[:MAX_IDS_NAMED])) + (", ..." if len(samples) > MAX_IDS_NAMED else "")
            where = f" in process {rank}, samples {named}"
        else:
            first = [int(batch[0]) for batch in self.group.all_gather(ids[0])]
            assert result.grad_norm is not None
            name, value = "grad_norm", float(result.grad_norm)
            where = f" (all losses are finite; the processes began with samples {', '.join(map(str, first))})"
        return f"{name} is {value} at step {step + 1}{where}: try a lower --learning_rate, or look at these samples"


class _Pending:
    """A vector on its way: processes that want to stop, processes with a number that is not finite."""

    def __init__(
        self, step: int | None, stops: bool, values: list[torch.Tensor | float], group: CpuGroup, on_gpu: bool
    ):
        self.step, self._group, self._event = step, group, None
        self._vector = torch.tensor([float(stops), 0.0])
        if on_gpu and values:
            finite = torch.stack([torch.as_tensor(value, device="cuda").float() for value in values]).isfinite().all()
            self._is_finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            return
        self._vector[1] = not all(math.isfinite(value) for value in values)
        self._work = group.sum_async(self._vector)

    def read(self) -> tuple[float, float]:
        if self._event is not None:
            self._event.synchronize()
            self._vector[1] = not bool(self._is_finite)
            self._work = self._group.sum_async(self._vector)
        if self._work is not None:
            self._work.wait()
        return tuple(self._vector.tolist())


class _HangWatch:
    """A thread that ends the run when `progress` has not been called for `--hang_timeout` seconds."""

    def __init__(self, plan: Plan, group: CpuGroup):
        self.timeout, self.output_dir, self.group = plan.config.hang_timeout, Path(plan.config.output_dir), group
        self._count, self._last = 0, time.monotonic()
        self._stop = threading.Event()
        # A connection of its own: on the one of the main thread, that may be waiting. torch's stub lacks `clone`.
        self._store: dist.Store | None = None
        if group.size > 1:
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self.progress()
        if self.timeout:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self.timeout:
            self._thread.join()  # what it holds of the process group must be gone when that is taken down

    def progress(self) -> None:
        self._count, self._last = self._count + 1, time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self._last > self.timeout:
                error = HangError(self._report())
                if not self._stop.is_set():  # the main thread has met the reason meanwhile
                    write_failure(self.output_dir, first_failure(error))
                    report(error)
                    end(error)

    def _report(self) -> str:
        stacks = self.output_dir / f"stacks_{self.group.rank:05d}.txt"
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        reports = self._exchange(self._position())
        line = f"no step for {self.timeout:g} s: "
        silent = [rank for rank in range(self.group.size) if rank not in reports]
        if silent:
            line += f"process {silent[0]} does not answer"
        else:
            # Who has come less far, or of those that came as far does not wait for others.
            rank, report = min(reports.items(), key=lambda item: (item[1]["count"], item[1]["waits"], item[0]))
            line += f"process {rank} did not arrive, it is at {report['place']}"
        return f"{line}; the stacks are in {self.output_dir}/stacks_*.txt"

    def _position(self) -> dict[str, Any]:
        assert self._main is not None
        frame: FrameType | None = sys._current_frames()[self._main]
        place, waits = None, False
        while frame is not None:
            path = frame.f_code.co_filename
            # All are in torch/distributed/elastic/, which calls main.
            waits = waits or re.search("torch/(autograd|distributed/(?!elastic))", path) is not None
            if place is None and "site-packages" not in path and "lib/python" not in path:
                place = f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return {"count": self._count, "waits": waits, "place": place}

    def _exchange(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """{rank: position} of the processes that answer."""
        found = {self.group.rank: own}
        if self._store is not None:
            # In a thread of its own: where the network is gone, the store does not answer either.
            asker = threading.Thread(target=self._ask, args=(self._store, own, found), daemon=True)
            asker.start()
            asker.join(ANSWER_S + min(2.0, self.timeout / 2))
        return dict(found)

    def _ask(self, store: dist.Store, own: dict[str, Any], found: dict[int, dict[str, Any]]) -> None:
        store.set(f"hang/{self.group.rank}", json.dumps(own))
        while missing := [rank for rank in range(self.group.size) if rank not in found]:
            for rank in missing:
                if store.check([f"hang/{rank}"]):
                    found[rank] = json.loads(store.get(f"hang/{rank}"))
            time.sleep(0.1)
