"""Promise: GPU benchmarks name the first evaluation that meets a goal, its seconds, and why a combination failed."""

from dataclasses import replace

import pytest

from benchmarks.gpt2_variants import reason, row
from benchmarks.gpu_goals import MNIST, TEXT, Evaluation, Goal, evaluations, result


def test_seconds_before_an_evaluation_are_those_of_its_records() -> None:
    goal = replace(MNIST, batch_size=10)
    records = [
        {"step": 5, "samples_per_second": 25.0},  # 5 steps of 10 samples: 2 seconds
        {"step": 10, "samples_per_second": 50.0},  # 1 second
        {"step": 10, "eval/accuracy": 0.98},
        {"step": 20, "samples_per_second": 100.0},  # 1 second
        {"step": 20, "eval/accuracy": 0.995},
    ]
    assert evaluations(records, goal) == [Evaluation(10, 0.98, 3.0, 2.0), Evaluation(20, 0.995, 4.0, 2.0)]
    assert evaluations([], goal) == []


@pytest.mark.parametrize(
    ("goal", "values", "seconds", "chosen", "best", "verdict"),
    [
        (MNIST, (0.980, 0.993, 0.995), (0.1, 0.3, 0.6), "0.9930 at step 2 | 0.30", "0.9950 at step 3", "met"),
        (MNIST, (0.980, 0.985, 0.995), (0.1, 0.3, 0.6), "0.9950 at step 3 | 0.60", "0.9950 at step 3", "missed"),
        (MNIST, (0.980, 0.990, 0.985), (0.1, 0.3, 0.4), "0.9900 at step 2 | 0.30", "0.9900 at step 2", "missed"),
        (TEXT, (1.600, 1.440, 1.420), (20, 40, 70), "1.4400 at step 2 | 40.00", "1.4200 at step 3", "met"),
        (TEXT, (1.600, 1.500, 1.550), (20, 40, 50), "1.5000 at step 2 | 40.00", "1.5000 at step 2", "missed"),
    ],
)
def test_first_evaluation_that_meets_a_goal(
    goal: Goal, values: tuple, seconds: tuple, chosen: str, best: str, verdict: str
) -> None:
    found = [Evaluation(step, value, second, 0.1) for step, (value, second) in enumerate(zip(values, seconds), 1)]
    line = result(goal, found)
    assert f"| {chosen} |" in line and f"| {best}, last {values[-1]:.4f} |" in line
    assert line.endswith(f"| {verdict} |")


def test_reason_of_a_failed_combination() -> None:
    errors = "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nSet X=1"
    assert reason(errors) == "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert reason("error: --attention cudnn needs a GPU: leave it out\n").startswith("error: --attention cudnn")
    assert reason("Killed") == "Killed" and reason("") == "no output"
    assert row("a=1", {"failed": "no | kernel"}) == "| a=1 | failed: no / kernel | | | |"
