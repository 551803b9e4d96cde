"""The records of a run: metrics.jsonl, the run card, trackers and the terminal's output."""

import dataclasses
import errno
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from tqdm import tqdm

from ..data.facts import data_lines
from ..data.mixed import OF, SHARE, of_sources
from ..environment import versions
from ..errors import UsageError, first_line
from ..files import for_json
from ..plan import Plan
from ..state import TrainState
from ..step.engine import Engine, StepResult
from .metrics_file import MetricsFile
from .output_dir import OutputDir, checkpoints
from .run_card import attempts, git_commit, git_diff, hardware, launch_command, peak_flops, read_card
from .running_sums import TOTAL_WEIGHT, RunningSums


class Recorder:
    """Adds up the results of steps; writes and prints records, and the run card.

    Between records nothing is read from the device. The main process writes, after it has entered the output folder.
    `facts` are extra entries of the card, which may change until the run is done. On entering, raises UsageError if a
    tracker does not start, or records cannot be written."""

    def __init__(self, engine: Engine, output_dir: OutputDir, state: TrainState, facts: dict[str, Any]):
        self.engine, self.accelerator, self.plan = engine, engine.accelerator, engine.plan
        self.state, options = state, engine.setup.options
        self.unrecorded = RunningSums()  # the steps since the last training record
        self.tokens_per_sample = options.get("tokens_per_sample")
        self.flops_per_sample = options.get("flops_per_sample")
        device = self.accelerator.device
        self._gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak_flops = peak_flops(self._gpu, self.plan.layout.precision)
        self.output_dir = output_dir
        self.last_metrics: dict[str, float] = {}
        self._num_lost, self.facts = 0, facts
        self._learning_rate: float | None = None
        self._grad_norm: torch.Tensor | float | None = None

    def __enter__(self) -> Self:
        self._started = self._resumed = time.perf_counter()
        if self.accelerator.is_main_process:
            self._facts = self._facts_of_start()
            start_trackers(self.accelerator, self.plan, self._facts["versions"])
            try:
                self.output_dir.set_aside(self.state)
                self._metrics = MetricsFile(self.output_dir.path, self._goes_on_after)
            except OSError as error:
                advice = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "use another"
                raise UsageError(
                    f"--output_dir {self.output_dir.path} cannot be written ({error.strerror}): {advice}"
                ) from None
            self.output_dir.write_card(self._card(None))
        self.output_dir.check_best(self.state)  # a collective: a process that fails later finds the card
        if not self.accelerator.is_main_process:
            self.output_dir.card = read_card(self.output_dir.path)
        warmup, num_steps = self.plan.config.warmup_steps, self.plan.num_steps
        if warmup > num_steps and self.plan.schedule is None:
            what = f"--warmup_steps {warmup} are more than the {num_steps} steps of this run"
            self.accelerator.print(f"{what}: the learning rate stays below its peak")
        hidden = not (self.accelerator.is_main_process and sys.stderr.isatty())  # the bar, which then does nothing
        self._bar = tqdm(total=self.plan.num_steps, initial=self.state.step, unit="step", disable=hidden)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None and self.unrecorded.num_taken:  # a loop that was copied, and left by break
            self.training()
        self._bar.close()
        if not self.accelerator.is_main_process:
            return
        self._num_lost = self._metrics.close()
        if error is None:
            self.output_dir.write_card(self._card(0))
            path = self.output_dir.path
            line = f"done in {self._wall_seconds:.1f} s: the model is in {path / 'model'}"
            if any(step == self.state.step for step, _ in checkpoints(path)):
                line += "; to train longer, run the same command with more --epochs or --max_steps and "
                line += "--resume_from_checkpoint latest"
            print(f"{line}; accelerate-recipes push {shlex.quote(str(path))} NAME uploads it", flush=True)
        else:
            self.output_dir.card = self._card(None)  # OutputDir adds how the run failed
        metrics = {name: value for name, value in self.last_metrics.items() if name.startswith("eval/")}
        times = {"wall_seconds": self._wall_seconds, "skipped_steps": self.state.num_skipped}
        summary = {f"summary/{name}": value for name, value in (metrics | times).items()}
        self.accelerator.log(summary, self.last_metrics.get("step"))
        for tracker in self.accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:  # it must not hide how the run ended
                print(f"{tracker.name} did not finish: {error}", file=sys.stderr, flush=True)

    def add(self, learning_rate: float, result: StepResult) -> None:
        """Adds one optimizer step."""
        self._learning_rate, self._grad_norm = learning_rate, None if result.skipped else result.grad_norm
        self.state.num_skipped += result.skipped
        self.unrecorded.add(result)
        self._bar.update()

    def training(self) -> None:
        """Writes a training record of the steps since the last one."""
        state, steps = self.state, self.unrecorded
        sums = steps.sums(self.engine, state.step)
        weight = sums.pop(TOTAL_WEIGHT) or math.nan
        self.facts |= self.engine.trained.say(state.step)
        self._count_seconds()
        samples_per_second = steps.num_taken * self.plan.config.batch_size / steps.seconds
        record = {
            "step": state.step,
            "epoch": round(state.step / self.plan.steps_per_epoch, 4),
            **of_sources({f"train/{name}": total / weight for name, total in sums.items()}),
            "learning_rate": self._learning_rate,
            "grad_norm": None if self._grad_norm is None else float(self._grad_norm),
            "samples_per_second": round(samples_per_second, 1),
        }
        if self.tokens_per_sample:
            record["tokens_per_second"] = round(samples_per_second * self.tokens_per_sample, 1)
        if self.flops_per_sample and self._peak_flops:
            peak = self._peak_flops * self.accelerator.num_processes
            record["mfu"] = round(samples_per_second * self.flops_per_sample / peak, 4)
        if self.accelerator.scaler is not None:
            record["skipped_steps"] = state.num_skipped
        self.unrecorded = RunningSums()
        self._write(record)
        self._show(record, (self.plan.num_steps - state.step) * steps.seconds / steps.num_taken)

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Writes an evaluation record."""
        record = {"step": self.state.step} | {f"eval/{name}": value for name, value in metrics.items()}
        self._write(record)
        self._show(record)
        if self.unrecorded.num_taken and self.plan.is_over(self.state):  # early stopping between two training records
            self.training()

    def flush(self) -> None:
        """Writes the records to the disk: a checkpoint that survives a power loss needs the records before it."""
        if self.accelerator.is_main_process:
            self._metrics.flush()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the `with` block from samples_per_second."""
        self._count_seconds()
        yield
        self._resumed = time.perf_counter()

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.unrecorded.seconds += now - self._resumed
        self._resumed = now

    def _write(self, record: dict[str, Any]) -> None:
        finite = for_json(record)
        self.last_metrics |= {name: value for name, value in finite.items() if value is not None}
        if self.accelerator.is_main_process:
            self._metrics.write(finite)
            numbers = {name: value for name, value in record.items() if value is not None and name != "step"}
            # Some trackers refuse the sign.
            self.accelerator.log({name.replace(OF, "_of_"): value for name, value in numbers.items()}, record["step"])

    def _show(self, record: dict[str, Any], seconds_left: float | None = None) -> None:
        """Prints an evaluation, or a training record with the remaining time of the run."""
        if not self.accelerator.is_main_process:
            return
        if seconds_left is None:
            hidden = ("step", *(name for name in record if SHARE + OF in name))
            shown = [f"{name} {_short(value)}" for name, value in record.items() if name not in hidden]
        else:
            # Evaluations do not report its parts, such as the sums of a ratio; metrics.jsonl has them.
            names = {"loss"} | {name.rpartition("/")[2] for name in self.last_metrics if name.startswith("eval/")}
            names -= {name for name in names if SHARE + OF in name}
            own = {name.removeprefix("train/"): value for name, value in record.items() if name.startswith("train/")}
            unit = "tokens" if self.tokens_per_sample else "samples"
            shown = [f"{name} {_short(value)}" for name, value in own.items() if name in names]
            shown += [f"learning_rate {_short(record['learning_rate'])}"]
            shown += [f"{_short(record[f'{unit}_per_second'])} {unit}/s", f"{tqdm.format_interval(seconds_left)} left"]
        if not self._bar.disable and seconds_left is not None:
            self._bar.set_postfix_str(f"{shown[0]}, {shown[-2]}")  # the bar shows the remaining time
            return
        line = "  ".join([f"step {record['step']}/{self.plan.num_steps}", *shown])
        print(line, flush=True) if self._bar.disable else self._bar.write(line)

    def _goes_on_after(self, record: dict[str, Any]) -> bool:
        """Whether to keep an earlier record: this run does not write it again."""
        state = self.state
        comes_again = state.evaluation_due and record["step"] == state.step and "train/loss" not in record
        return record["step"] <= state.step and not comes_again

    @property
    def _wall_seconds(self) -> float:
        return time.perf_counter() - self._started

    def _facts_of_start(self) -> dict[str, Any]:
        """The entries of the run card that do not change."""
        attempt, earlier = attempts(self.output_dir.path, bool(self.plan.config.resume_from_checkpoint))
        return {
            "attempt": attempt,
            "first_step": self.state.step,
            "earlier_attempts": earlier,
            "launcher": os.getppid(),
            "command": " ".join(sys.argv),
            "config": dataclasses.asdict(self.plan.config),
            "parallelism": str(self.plan.layout),
            "precision": self.plan.layout.precision,
            "num_processes": self.accelerator.num_processes,
            "threads_per_process": torch.get_num_threads(),
            "micro_batch_size": self.plan.micro_batch_size,
            "gradient_accumulation_steps": self.plan.accumulation,
            "num_steps": self.plan.num_steps,
            "versions": versions("torch", "accelerate", "transformers", "datasets", "deepspeed"),
            "git_commit": git_commit(),
            "git_diff": git_diff(),
            "launch_command": launch_command(),
            "hardware": hardware(),
            "data": data_lines(),
        }

    def _card(self, exit_code: int | None) -> dict[str, Any]:
        """The run card: status done with an exit code, running without one."""
        return {
            "status": "running" if exit_code is None else "done",
            "exit_code": exit_code,
            "error": None,
            **self._facts,
            **self.facts,
            # The most that tensors of this process held at one time.
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if self._gpu else None,
            "skipped_steps": self.state.num_skipped,
            "lost_records": self._num_lost,
            "last_metrics": self.last_metrics,
            "wall_seconds": round(self._wall_seconds, 2),
        }


def _short(value: float) -> str:
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}" if value < 1e3 else f"{value:,.0f}"


def start_trackers(accelerator: Accelerator, plan: Plan, versions: dict[str, str]) -> None:
    """Starts the trackers, with the config of the run. Raises UsageError if one does not start."""
    config = dataclasses.asdict(plan.config) | versions
    config |= {"parallelism": str(plan.layout), "precision": plan.layout.precision}
    for name, value in config.items():  # trackers accept neither None nor Path
        config[name] = "" if value is None else str(value) if isinstance(value, Path) else value
    try:
        accelerator.init_trackers(Path(sys.argv[0]).stem, config, {"wandb": {"dir": str(plan.config.output_dir)}})
    except Exception as error:  # each tracker has its own error classes
        advice = " (without a network: WANDB_MODE=offline)" if "wandb" in plan.config.report_to else ""
        raise UsageError(f"--report_to {plan.config.report_to} did not start: {first_line(error)}{advice}") from None
