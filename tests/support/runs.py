"""A finished run, and comparisons of two runs."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file

from accelerate_recipes.common.check.tolerances import FLOAT32
from accelerate_recipes.common.check.tolerances import TOLERANCE as TOLERANCE
from accelerate_recipes.common.records.output_dir import checkpoints
from accelerate_recipes.verify.certificate import Row
from accelerate_recipes.verify.differences import Trace, compare, distances, relative

ROOT = Path(__file__).parents[2]
TIMED = ("samples_per_second", "tokens_per_second")  # depend on the clock


@dataclass(frozen=True)
class Run:
    """The output and the folder of a finished run.

    Attributes:
        exit_code: of the launcher, which turns every failure into 1; in a forked run, of the recipe.
    """

    exit_code: int
    stdout: str
    stderr: str
    output_dir: Path

    @cached_property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]

    @property
    def lasting_records(self) -> list[dict]:
        """The records without values that depend on the clock."""
        return [{name: record[name] for name in record if name not in TIMED} for record in self.records]

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints on disk."""
        return [step for step, _ in checkpoints(self.output_dir)]

    @cached_property
    def card(self) -> dict:
        return json.loads((self.output_dir / "run.json").read_text())

    @cached_property
    def trace(self) -> Trace:
        return Trace.of_run(self.output_dir)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.output_dir / "model" / "model.safetensors")


def assert_equal_to_the_last_bit(run: Run, reference: Run) -> None:
    """Compares records and exported weights."""
    assert run.lasting_records == reference.lasting_records
    assert weight_distance(run, reference) == 0


def assert_same_result(run: Run, expected: Run) -> None:
    """Checks the README's promise: the same losses, learning rates, evaluations and weights."""
    assert expected.column("train/loss") and expected.column("grad_norm") and expected.trace.weights
    difference = compare(run.trace, expected.trace, tolerances=FLOAT32)
    assert difference.is_same, f"{Row('run', None, difference).verdict}: {difference}"
    for file in expected.output_dir.glob("model/*.json"):  # a transformers model has some
        assert (run.output_dir / "model" / file.name).read_text() == file.read_text()


def weight_distance(run: Run, reference: Run) -> float:
    """Largest ‖w − w₀‖ / ‖w₀‖ of all weight tensors; infinite if one lacks a tensor, or has another shape or type."""
    assert run.output_dir != reference.output_dir, "the weights of one folder are equal to themselves"
    return max(distances(run.trace.weights, reference.trace.weights).values())


def largest_difference(values: list[float], expected: list[float]) -> float:
    """Largest relative difference; the lists must have the same length."""
    assert len(values) == len(expected) > 0
    return max(map(relative, values, expected))


def refused(run: Run) -> str:
    """Returns the error line of a refused run. Checks that it is the only one, with no traceback from our code."""
    output = f"{run.stdout}\n{run.stderr}"  # a process may end within a line
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert run.exit_code in (1, 2) and len(lines) == 1, output
    for folder in ("accelerate_recipes", "common", "recipes", "tests"):
        assert f'File "{ROOT / folder}' not in output, "a traceback from our code"
    codes = {line.split()[2] for line in run.stderr.splitlines() if line.strip().startswith("exitcode  :")}
    # torchrun ends the other processes with SIGTERM (-15) unless they have ended.
    assert codes <= {"2", "-15"} and (not codes or "2" in codes), output
    return lines[0]
