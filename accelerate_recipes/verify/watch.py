"""Verifies a script on plain Accelerate: one process against DDP, watched from outside."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import count_gpus, find_config
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.verify.certificate import Row, Table, write
from accelerate_recipes.verify.compare import TIMES_FLOOR, TOLERANCE, Difference, relative, weight_distances
from accelerate_recipes.verify.runs import LAUNCH

WATCHED = Path(__file__).with_name("watched.py")
# The last line of a traceback, perhaps behind torchrun's prefix: not a line of code that names an error.
_ERROR = re.compile(
    r"^(?:\[\w+\]:\s)?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b(?!.*(?:ChildFailed|CalledProcess)).*)", re.M
)


@dataclass(frozen=True)
class Watched:
    """What the processes of a run did."""

    folder: Path

    @cached_property
    def processes(self) -> list[dict[str, Any]]:
        """The records of each process."""
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("process_*.json"))]

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
        """Whether the micro-batches of a step have different numbers of labels."""
        return any(len({part.get("tokens") for part in _parts(step)}) > 1 for step in self.steps)

    @property
    def parts_at(self) -> int | None:
        """The first step after which the processes have different weights; None if there is none."""
        unequal = (n for n, step in enumerate(self.steps, 1) if len({record["weights"] for record in step}) > 1)
        return next(unequal, None)

    def fact(self, name: str) -> Any:
        """What the first process found out."""
        return self.processes[0].get(name)


def verify_watched(script: Path, flags: list[str], steps: int, output: Path | None, as_json: bool) -> int:
    """Runs the script on one process and under DDP, compares them and writes the certificate; returns the exit code.

    If they differ, one process runs twice more, once with weights that start one rounding error away: what differs no
    more than ten times as far is noise.

    Args:
        script: its path, or the name of a module.
        flags, steps, output, as_json: those of the command.

    Raises:
        UsageError: no such script, or it takes no steps.
    """
    file, table = _file_of(script), Table(sys.stderr if as_json else sys.stdout)
    table.begin(["single, 2 accumulated", "ddp (MULTI_CPU)"])
    with TemporaryDirectory(prefix="verify_") as scratch:

        def watched(name: str, config: str, *how: str) -> Watched:
            return watch(script, flags, steps, config, Path(scratch) / name, *how)

        single, ddp = watched("single", "single"), watched("ddp", "ddp")
        table.add(Row(f"single ({single.fact('distributed_type')})", 1, note="the reference"))
        if single.fact("by_trainer"):  # it keeps the global batch, however it is divided
            table.add(
                Row("single, 2 accumulated", 1, difference=_compare(watched("in_2", "single", "accumulated"), single))
            )
        difference, cause = _compare(ddp, single), None
        if not difference.is_same:
            again = watched("again", "single")
            repeated = _compare(again, single)
            table.add(Row("single, again", 1, difference=repeated))
            difference = _compare(ddp, single, watched("moved", "single", "moved"))
            if not difference.is_same:
                cause = _likely_cause(ddp, single, difference)
            if not repeated.is_same:
                cause = _cause_of_other_repetition(again, single)
        table.add(Row(f"ddp ({ddp.fact('distributed_type')})", len(ddp.processes), difference=difference))
    folder = output or Path("verified") / script.stem
    write(folder, file, flags, len(single.steps), table.rows, cause, as_json)
    return int(any(row.is_bad for row in table.rows))


def _file_of(script: Path) -> Path:
    """The file of a script, or of a module by name. Raises UsageError if there is neither."""
    if script.is_file():
        return script
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(str(script))
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin:
        raise UsageError(f"{script}: no such file or module; type the path of a script, or package.module")
    return Path(found.origin)


def watch(script: Path, flags: list[str], steps: int, config: str, folder: Path, how: str = "as it is") -> Watched:
    """Runs a script under a config, and returns what its processes did. Raises UsageError if it takes no step."""
    folder.mkdir()
    command = [*LAUNCH, "--config_file", str(find_config(config)), str(WATCHED), str(folder), str(steps), how]
    # Without a GPU, Accelerate would run each process of the config alone.
    rehearsal = {} if count_gpus() else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | rehearsal
    command += [str(script), *flags]
    run = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    watched = Watched(folder)
    if not watched.processes or not watched.steps:
        found = _ERROR.search(run.stderr) or _ERROR.search(run.stdout)
        reason = found[1] if found else "it takes no step with an optimizer that Accelerate prepared"
        raise UsageError(f"{script} cannot be watched under {config}.yaml: {reason}")
    return watched


def _compare(run: Watched, reference: Watched, moved: Watched | None = None) -> Difference:
    """The difference of a run; `moved` is one process with other rounding errors, for what is noise."""
    losses = [relative(value, other) for value, other in zip(run.losses, reference.losses)]
    floors = [relative(value, other) for value, other in zip(moved.losses, reference.losses)] if moved else []
    floors = floors if losses and losses[0] <= TOLERANCE else []  # a wrong sum shows in the first step
    allowed = [max(TOLERANCE, TIMES_FLOOR * max(floors[: step + 1], default=0)) for step in range(len(losses))]
    rates = [relative(value, other) for value, other in zip(run.learning_rates, reference.learning_rates)]
    norms = [relative(value, other) for value, other in zip(run.grad_norms, reference.grad_norms)]
    samples = [one == other for one, other in zip(run.samples, reference.samples)]
    wrong = [
        step
        for step, (loss, most, rate, same) in enumerate(zip(losses, allowed, rates, samples), 1)
        if not loss <= most or rate > 0 or not same
    ]
    distances, moves = weight_distances(run.folder, reference.folder), {}
    if floors and moved is not None:
        moves = weight_distances(moved.folder, reference.folder)
    most_of = {name: max(TOLERANCE, TIMES_FLOOR * moves.get(name, 0.0)) for name in distances}
    tensor = next((name for name, value in distances.items() if not value <= most_of[name]), None)
    is_same = not wrong and tensor is None
    gathered, expected = run.fact("gathered"), reference.fact("gathered")
    return Difference(
        loss=max(losses),
        gradient=max(norms, default=None),
        weights=max(distances.values(), default=0.0),
        evaluation=relative(gathered, expected) if expected else None,
        learning_rate=max(rates),
        first_step=min(wrong, default=None),
        tensor=tensor,
        is_same=is_same and gathered == expected,
        is_noise=is_same and (max(losses) > TOLERANCE or max(distances.values(), default=0.0) > TOLERANCE),
    )


def _cause_of_other_repetition(again: Watched, single: Watched) -> str:
    """Why one process does not repeat itself."""
    if again.samples != single.samples:
        return "one process takes other samples when it runs again: seed the shuffling, with set_seed at the start"
    return (
        "one process has other losses when it runs again on the same samples: call set_seed before the model is "
        "built; weights, dropout and noise are drawn"
    )


def _likely_cause(run: Watched, reference: Watched, difference: Difference) -> str:
    """One line about the most likely cause of a difference, and what to do."""
    at = (difference.first_step or 1) - 1
    (ids, expected), size = (run.samples[at] or [], reference.samples[at] or []), len(run.processes)
    layers = [name for name in run.fact("layers") if "BatchNorm" in name]
    kind, gathered = run.fact("distributed_type"), (run.fact("gathered"), reference.fact("gathered"))
    is_later = at > 0 and len(run.samples[0] or []) == len(reference.samples[0] or [])
    causes: list[tuple[Any, str]] = [
        (
            run.fact("num_processes") != size or kind == "NO",
            f"the {size} processes train alone: Accelerate runs {kind} in each",
        ),
        (
            difference.first_step is None and difference.tensor is None and gathered[0] != gathered[1],
            f"the evaluation gathers {gathered[0]} rows under DDP and {gathered[1]} in one process: gather keeps what "
            "fills up the last batch; call gather_for_metrics",
        ),
        (
            run.fact("divided_twice"),
            "the loader has a DistributedSampler, and prepare divides its samples again: leave out the sampler",
        ),
        (
            is_later and len(ids) > len(expected),
            f"step {at + 1} takes {len(ids)} samples under DDP and {len(expected)} in one process: prepare fills up "
            "the last batch of an epoch with other samples (even_batches): set drop_last=True in the loader",
        ),
        (
            len(ids) != len(expected),
            f"a step takes {len(ids)} samples under DDP and {len(expected)} in one process: divide the batch "
            "size of the loader by accelerator.num_processes",
        ),
        (
            run.repeats_an_epoch and not reference.repeats_an_epoch,
            "under DDP each epoch has the same order: call set_epoch on the sampler or loader before each epoch",
        ),
        (ids != expected, "steps take other samples than in one process: seed the shuffling in a generator of its own"),
        (
            run.learning_rates[: at + 1] != reference.learning_rates[: at + 1],
            f"the schedule is elsewhere after the same step: a prepared scheduler advances {size} times per step; "
            "create the Accelerator with step_scheduler_with_optimizer=False, or do not prepare the scheduler",
        ),
        (
            run.parts_at,
            f"the processes have different weights after step {run.parts_at}: gradients are not averaged in each step "
            "(local steps, no_sync, a backward pass beside the prepared model)",
        ),
        (
            run.fact("comm_hook") or run.fact("hooked"),
            "a hook changes gradients in each process before or while they are averaged: remove it to compare",
        ),
        (
            run.fact("draws"),
            "the forward pass draws random numbers (dropout, noise), which differ in each process: losses agree on "
            "average only; set dropout to 0, or draw in the dataset, to compare",
        ),
        (
            run.has_unequal_parts,
            "micro-batches have different numbers of tokens, but the mean of each counts the same: divide the sum of "
            "each by the number of tokens of the whole step",
        ),
        (layers, f"{', '.join(layers)} sees only the samples of one process: use GroupNorm or LayerNorm"),
    ]
    unknown = "none found: samples, learning rates and parts of each step agree"
    return next((text for condition, text in causes if condition), unknown)


def _parts(step: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The micro-batches of a step in all processes."""
    return [part for record in step for part in record["micro_batches"]]


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")
