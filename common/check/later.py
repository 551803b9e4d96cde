"""Comparisons with one process after the checked steps: in a rehearsal, and after a save."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..alone.kept import NotChecked, unheard
from ..alone.walk import Walk
from ..cpu_group import CpuGroup
from ..data.sets import Metrics
from ..environment import variables_of_one_process
from ..errors import UsageError
from ..evaluation import measure
from ..layout import Layout
from ..records.running_sums import TOTAL_WEIGHT, RunningSums
from ..step.engine import Engine, StepResult
from ..step.guards import changing_sample, digest
from ..weights.on_disk import with_full_weights
from .compare import Key, step_gaps
from .reference import ROUNDINGS, Perturbed, ReferenceRun
from .tolerances import BF16, LATER, TRAJECTORY_TIMES_FLOOR
from .trace import Step

STEPS = (10, 100)  # from the start of a run, counted from 1; of a shorter run the last one
MAX_SECONDS = 3.0  # the most time that one process may take for them
COMPARED = (("value", "loss"), ("eval", "loss"), ("norm", ""))


@dataclass
class Rehearsal:
    """Later steps of one process in a rehearsal on the CPU, which exists to find mistakes."""

    steps: dict[int, Step]  # {number: what the step did}
    moved: dict[int, Step]  # the same from weights that are perturbed by rounding errors: a trajectory amplifies them
    evaluated: dict[int, Metrics]  # {number of steps taken: metrics of an evaluation}
    moved_evaluated: dict[int, Metrics]
    first: Step  # the first step of the run
    is_low: bool  # whether a layer computes with fewer bits than float32
    keeps: str  # names of buffers, and of values in layers, that the first steps changed

    @classmethod
    def take(cls, run: ReferenceRun, first: Step) -> "Rehearsal | None":
        """Takes the later steps of a run on one process, from this first step; None if they take too long."""
        plan, number = run.setup.plan, run.numbers[0]
        later = {min(step, plan.num_steps - number) for step in STEPS} - {*range(plan.config.check_steps + 1)}
        numbers = [number + step - 1 for step in sorted(later) if run.seconds * step * 2 <= MAX_SECONDS]
        if not numbers or run.setup.accelerator.device.type != "cpu":
            return None
        before = [last for last in numbers if not any(map(plan.evaluates, range(number + 1, last + 1)))]
        ways = ([(numbers, True)] if _may_evaluate(run) else []) + ([(before, False)] if before else [])
        lasts, rehearsal = _last_samples(run), None
        for chosen, evaluates in ways:
            evaluated, moved = dict[int, Metrics](), dict[int, Metrics]()
            own, other = (_evaluate(found) if evaluates else None for found in (evaluated, moved))
            # The run will show an error, with its samples. Weights on disk stay there, as in other processes.
            with suppress(Exception), with_full_weights(run.setup.model):
                steps = run.steps(chosen, None, compares=run.first_pass, first=number, evaluate=own)
                again = Perturbed.take(run, chosen, ROUNDINGS[0], first=number, evaluate=other).steps
                held = [*run.first_pass.written, *(run.changes.in_model if run.changes else ())][:2]
                rehearsal = cls(steps, again, evaluated, moved, first, run.is_low, " or ".join(held))
                break
        if changed := lasts.items() - _last_samples(run).items():
            raise UsageError(changing_sample(min(changed)[0]))
        return rehearsal

    def line(self, steps: Sequence[Step], layout: Layout, number: int) -> str | None:
        """The line that ends a run whose step `number` differs from one process, or None. `steps`: of each process."""
        expected = self.steps[number]
        floors = step_gaps(self.moved[number], expected)
        # By chance, one of the values moves little.
        limit = TRAJECTORY_TIMES_FLOOR * max(floors[key].size for key in COMPARED if key in floors)
        limits = {key: max(self._tolerance(key, expected), limit) for key in COMPARED}
        each = (step_gaps(step, expected, rank) for rank, step in enumerate(steps))
        found = [gaps[key] for gaps in each for key in COMPARED if key in gaps and not gaps[key].size <= limits[key]]
        return self._line(layout, f"in step {number + 1}, {found[0].text}") if found else None

    def line_of_evaluation(self, metrics: Metrics, layout: Layout, number: int) -> str | None:
        """The same for the losses of the evaluation after `number` steps."""
        size, share = _size(self.first, ("value", "loss")), BF16[""] if self.is_low else LATER
        for name, expected in self.evaluated[number].items():
            floor = max(abs(self.moved_evaluated[each][name] - one[name]) for each, one in self.evaluated.items())
            limit = share * max(size, abs(expected)) + TRAJECTORY_TIMES_FLOOR * floor
            if name.rpartition("/")[2] == "loss" and abs(metrics[name] - expected) > limit:
                what = f'the evaluation after step {number} gives "{name}" as {metrics[name]:.7g}'
                return self._line(layout, f"{what}, {expected:.7g} on one process")
        return None

    def _line(self, layout: Layout, what: str) -> str:
        return (
            f"{layout} does not give the result of one process: {what}\n"
            "  likely cause: the first steps were the same; something begins later, or after an evaluation, such as "
            f"a hook, dropout or a schedule{f', or what follows from {self.keeps}' * bool(self.keeps)}\n"
            "  --check_steps 0 trains without this check"
        )

    def _tolerance(self, key: Key, expected: Step) -> float:
        if self.is_low:
            return BF16["grad_norm" if key[0] == "norm" else ""]
        # A loss near 0 consists of rounding errors: its size in the first step is what counts.
        return LATER * max(1.0, _size(self.first, key) / max(_size(expected, key), 1e-30))


def _may_evaluate(run: ReferenceRun) -> bool:
    """Whether one process can take the evaluations of the run, too, within `MAX_SECONDS`, and restore what they
    change."""
    setup, plan, walk = run.setup, run.setup.plan, Walk()
    functions = [setup.options.get(name) for name in ("summarize", "examples")]
    passes = sum(-(-len(each) // plan.micro_batch_size) for each in setup.eval_sets.values())
    # The run measures the metric of the best model once before the first step.
    if (plan.config.metric_for_best_model and any(functions)) or passes * run.seconds / plan.accumulation > MAX_SECONDS:
        return False
    walk.visit(functions)
    return not walk.iterators and not walk.open


def _last_samples(run: ReferenceRun) -> dict[str, str]:
    """Digests of the last sample of each evaluation set."""
    named = {f"evaluation{f' {key}' * bool(key)}": each for key, each in run.setup.eval_sets.items()}
    return {f"sample {len(each) - 1} of the {kind} set": digest(each, len(each) - 1) for kind, each in named.items()}


def _evaluate(found: dict[int, Metrics]) -> Callable[[Engine, int], None]:
    """A function that evaluates as the run does, and notes the metrics."""
    ends = time.thread_time() + MAX_SECONDS

    def evaluate(engine: Engine, number: int) -> None:
        with unheard(), engine.ema_weights():
            metrics = measure(engine, engine.setup.eval_sets, lambda: time.thread_time() > ends, number)
        if metrics is None:
            raise NotChecked("the evaluations take too long")
        found[number] = metrics

    return evaluate


def _size(step: Step, key: Key) -> float:
    if key[0] == "norm":
        return step.grad_norm
    losses = [values["loss"].abs().mean() for values in step.values.values() if "loss" in values]
    return float(sum(losses) / max(len(losses), 1))


class AfterSaves:
    """With `--check_every`, compares the two steps after a save with one process, which resumes from the checkpoint on
    the CPU, in its own folder. The second step shows how the first one moved the weights. `every`: number of steps,
    from `--check_every`; 0: nothing is compared."""

    def __init__(self, engine: Engine, group: CpuGroup, every: int):
        self._engine, self._plan, self._group, self._every = engine, engine.plan, group, every
        self.numbers = range(0)  # of the steps that are compared next
        self._own, self._path, self._folder = dict[int, tuple[float, float]](), Path(), Path()
        self._process: subprocess.Popen[bytes] | None = None  # one process, in its own folder
        self._num_checks, self._with = 0, ExitStack()  # of the process that runs now

    def start(self, step: int, finish: Callable[[], Path | None]) -> None:
        """To call after each save. `step`: number of steps taken; `finish`: waits for the checkpoint and returns it."""
        num_checks = step // self._every if self._every else 0
        numbers = range(step, min(step + 2, self._plan.num_steps))
        if num_checks == self._num_checks or not numbers or (path := finish()) is None:
            return
        self._num_checks, self.numbers, self._own, self._path = num_checks, numbers, {}, path
        if self._group.rank != 0:
            return
        folder = Path(self._with.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        output = self._with.enter_context((folder / "output.txt").open("w"))
        sizes = ["--pipeline_stages", "1", "--pipeline_schedule", "1f1b", "--expert_parallel", "1"]
        sizes += ["--micro_batch_size", str(self._plan.micro_batch_size)]  # dropout depends on it
        records = ["--log_every", "1", "--save_every", "0", "--check_every", "0", "--report_to", ""]
        places = ["--output_dir", str(folder), "--resume_from_checkpoint", str(path.absolute())]
        command = [sys.executable, *sys.argv, *sizes, *records, *places]
        process = subprocess.Popen(command, env=variables_of_one_process(), stdout=output, stderr=subprocess.STDOUT)
        self._with.callback(process.wait)
        self._with.callback(process.kill)
        self._process, self._folder = process, folder

    def compare(self, number: int, result: StepResult) -> None:
        """A collective, after each of `numbers`. Raises UsageError if a step so far differs from one process."""
        sums = RunningSums()
        sums.add(result)
        totals = sums.sums(self._engine, number + 1)
        norm = math.nan if result.grad_norm is None else float(result.grad_norm)
        self._own[number + 1] = totals["loss"] / totals[TOTAL_WEIGHT], norm
        if number != self.numbers[-1]:
            return
        self.numbers = range(0)
        line, problem = self._group.broadcast(self._found() if self._group.rank == 0 else None)
        self.close()
        if problem:
            self._engine.accelerator.print(f"the steps after {self._path} are not compared with one process: {problem}")
        elif line:
            raise UsageError(
                f"{self._plan.layout} does not give the result of one process after {self._path}: {line}; "
                f"accelerate-recipes verify {sys.argv[0]} --checkpoint {self._path} looks for the cause"
            )

    def close(self) -> None:
        """Ends the process, and removes its folder."""
        self._with.close()

    def _found(self) -> tuple[str, str]:
        """(the difference, empty if there is none; why nothing was compared, empty if something was)"""
        ends = time.monotonic() + min(600.0, self._plan.config.hang_timeout / 2 or 600.0)
        alone, path = dict[int, tuple[float, float]](), self._folder / "metrics.jsonl"
        while not self._own.keys() <= alone.keys():
            is_over = self._process is None or self._process.poll() is not None  # before its records are read
            text = path.read_text() if path.exists() else ""
            records = [json.loads(line) for line in text.split("\n")[:-1]]  # the complete ones
            alone = {each["step"]: (each["train/loss"], each["grad_norm"]) for each in records if "grad_norm" in each}
            if is_over and not self._own.keys() <= alone.keys():
                lines = (self._folder / "output.txt").read_text(errors="replace").split("\n")
                return "", next((line for line in reversed(lines) if "rror" in line), "it ended without a line")
            if time.monotonic() > ends:
                return "", "one process takes too long"
            time.sleep(0.05)
        is_low = self._plan.layout.precision != "float32"
        tolerances = (BF16[""], BF16["grad_norm"]) if is_low else (LATER, 10 * LATER)
        for step, own in self._own.items():
            for name, value, expected, tolerance in zip(("train/loss", "grad_norm"), own, alone[step], tolerances):
                if name == "train/loss" and step == min(self._own):
                    continue  # its record also covers earlier steps, which no record covered before the save
                if not abs(value - expected) <= tolerance * abs(expected):
                    return f"the {name} of step {step} is {value:.7g}, {expected:.7g} on one process", ""
        return "", ""
