"""Verifies a script on plain Accelerate: one process against DDP, watched from outside."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import count_gpus, find_config
from accelerate_recipes.errors import UsageError
from accelerate_recipes.verify.certificate import Row, Table, write
from accelerate_recipes.verify.compare import TOLERANCE, Difference, largest_distance, relative
from accelerate_recipes.verify.runs import LAUNCH

WATCHED = Path(__file__).with_name("watched.py")


@dataclass(frozen=True)
class Watched:
    """What the processes of a run did."""

    folder: Path

    @cached_property
    def processes(self) -> list[dict[str, Any]]:
        """The records of each process."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("process_*.json"))]

    @property
    def steps(self) -> list[tuple[dict[str, Any], ...]]:
        """For each optimizer step, its record in each process."""
        return list(zip(*(process["steps"] for process in self.processes)))

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step, over micro-batches and processes."""
        return [_mean(part["loss"] for part in _parts(step)) for step in self.steps]

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each step."""
        return [step[0]["learning_rate"] for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        """What `clip_grad_norm_` returned; empty if the script does not call it."""
        norms = [step[0]["grad_norm"] for step in self.steps]
        return [] if None in norms else norms

    @property
    def samples(self) -> list[list[int] | None]:
        """The sorted sample ids of each step; None if the script's loader does not use ids."""
        found: list[list[int] | None] = []
        for step in self.steps:
            parts = [part.get("ids") or [] for part in _parts(step)]
            found.append(sorted(number for part in parts for number in part) if all(parts) else None)
        return found

    @property
    def repeats_an_epoch(self) -> bool:
        """Whether a process takes the same samples in the same order in each of its first two epochs."""
        orders: dict[int, list[int]] = {}
        for step in self.processes[0]["steps"]:
            for part in step["micro_batches"]:
                orders.setdefault(part.get("epoch", 0), []).extend(part.get("ids") or [])
        first, second = [*orders.values(), [], []][:2]
        return len(second) > 1 and first[: len(second)] == second

    @property
    def has_unequal_parts(self) -> bool:
        """Whether the micro-batches of a step have different numbers of tokens."""
        return any(len({part.get("tokens") for part in _parts(step)}) > 1 for step in self.steps)


def verify_watched(script: Path, flags: list[str], steps: int, output: Path | None, as_json: bool) -> int:
    """Runs the script on one process and under DDP, compares them and writes the certificate; returns the exit code."""
    table = Table(sys.stderr if as_json else sys.stdout)
    table.begin(["single", "ddp (MULTI_CPU)"])
    with TemporaryDirectory(prefix="verify_") as scratch:
        single, ddp = (_watch(script, flags, steps, config, Path(scratch) / config) for config in ("single", "ddp"))
        table.add(Row(f"single ({_kind(single)})", 1, note="the reference"))
        difference = _compare(ddp, single)
        cause = None if difference.is_same else _likely_cause(ddp, single)
        table.add(Row(f"ddp ({_kind(ddp)})", len(ddp.processes), difference=difference))
    write(output or Path("verified") / script.stem, script, flags, len(single.steps), table.rows, cause, as_json)
    return int(not difference.is_same)


def _watch(script: Path, flags: list[str], steps: int, config: str, folder: Path) -> Watched:
    folder.mkdir()
    command = [*LAUNCH, "--config_file", str(find_config(config)), str(WATCHED), str(folder), str(steps), str(script)]
    # Without a GPU, Accelerate would run each process of the config alone.
    rehearsal = {} if count_gpus() else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, *flags], env=os.environ | rehearsal, capture_output=True, text=True)
    watched = Watched(folder)
    if not watched.processes or not watched.steps:
        lines = [line for line in (run.stderr + run.stdout).splitlines() if "Error" in line or "error: " in line]
        reason = lines[0] if lines else "it takes no step with an optimizer that Accelerate prepared"
        raise UsageError(f"{script} cannot be watched under {config}.yaml: {reason}")
    return watched


def _compare(run: Watched, reference: Watched) -> Difference:
    losses = [relative(value, other) for value, other in zip(run.losses, reference.losses)]
    rates = [relative(value, other) for value, other in zip(run.learning_rates, reference.learning_rates)]
    norms = [relative(value, other) for value, other in zip(run.grad_norms, reference.grad_norms)]
    samples = [one == other for one, other in zip(run.samples, reference.samples)]
    wrong = [
        step
        for step, (loss, rate, same) in enumerate(zip(losses, rates, samples), 1)
        if not loss <= TOLERANCE or rate > 0 or not same
    ]
    distance, tensor = largest_distance(run.folder, reference.folder)
    return Difference(
        loss=max(losses),
        gradient=max(norms, default=None),
        weights=distance,
        evaluation=None,
        learning_rate=max(rates),
        first_step=min(wrong, default=None),
        tensor=tensor,
        is_same=not wrong and tensor is None,
    )


def _likely_cause(run: Watched, reference: Watched) -> str:
    """One line about the most likely cause of a difference, and what to do."""
    facts, (ids, expected) = run.processes[0], (run.samples[0], reference.samples[0])
    size, num_samples = len(run.processes), (len(ids or []), len(expected or []))
    layers = [name for name in facts["layers"] if "BatchNorm" in name]
    causes: list[tuple[Any, str]] = [
        (
            facts["num_processes"] != size or facts["distributed_type"] == "NO",
            f"the {size} processes train alone: Accelerate runs {facts['distributed_type']} in each",
        ),
        (
            num_samples[0] != num_samples[1],
            f"a step takes {num_samples[0]} samples under DDP and {num_samples[1]} in one process: divide the batch "
            "size of the loader by accelerator.num_processes",
        ),
        (
            run.repeats_an_epoch and not reference.repeats_an_epoch,
            "under DDP each epoch has the same order: call set_epoch on the sampler or loader before each epoch",
        ),
        (
            run.samples != reference.samples,
            "steps take other samples than in one process: seed the shuffling in a generator of its own",
        ),
        (
            run.learning_rates != reference.learning_rates,
            f"the schedule is elsewhere after the same step: a prepared scheduler advances {size} times per step; "
            "create the Accelerator with step_scheduler_with_optimizer=False, or do not prepare the scheduler",
        ),
        (
            run.has_unequal_parts,
            "micro-batches have different numbers of tokens, but the mean of each counts the same: divide the sum of "
            "each by the number of tokens of the whole step",
        ),
        (layers, f"{', '.join(layers)} sees only the samples of one process: use GroupNorm or LayerNorm"),
        (facts["drops"], "dropout draws other numbers in each process, so losses agree on average only"),
    ]
    unknown = "none found: samples, learning rates and parts of each step agree"
    return next((text for condition, text in causes if condition), unknown)


def _kind(run: Watched) -> str:
    return run.processes[0]["distributed_type"]


def _parts(step: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The micro-batches of a step in all processes."""
    return [part for record in step for part in record["micro_batches"]]


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")
