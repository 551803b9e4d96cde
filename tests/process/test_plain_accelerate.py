"""Promise: plain_accelerate.py and linear_regression.py of recipes/plain give the losses of one process."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.launching import execute, fork
from support.plain import PLAIN, accuracy, launched, losses, one_process, plain
from support.recipes import MNIST
from support.runs import Run, largest_difference

SCRIPT = "plain_accelerate.py"
# Clips in each step, and changes the learning rate in each step.
FLAGS = "--steps 24 --learning_rate 0.5 --lr_schedule cosine --warmup_steps 3 --max_grad_norm 0.05"


def under(folder: Path, config: str, num_processes: int, arguments: str) -> Run:
    """Runs plain_accelerate.py under a config of accelerate_configs/."""
    run = launched(folder, config, num_processes, str(PLAIN / SCRIPT), *arguments.split())
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


def test_losses_of_one_process(tmp_path: Path) -> None:
    """By default it is one_process.py; the evaluation counts each of the 359 samples once."""
    expected = one_process(60)
    run = under(tmp_path, "ddp", 2, "--steps 60")
    assert len(losses(run)) == 60
    assert largest_difference(losses(run), losses(expected)) <= 1e-5
    assert accuracy(run) == pytest.approx(accuracy(expected), abs=1e-4)


@pytest.mark.full
def test_losses_of_the_recipe(tmp_path: Path) -> None:
    """The orders are equal: recipe and script shuffle each epoch with the seed 1_000_003 x seed + epoch, take
    consecutive batches and drop the last, smaller one. 24 steps are two epochs of 11 steps and two steps."""
    script = plain(tmp_path, SCRIPT, FLAGS)
    arguments = FLAGS.replace("--steps", "--max_steps") + (
        " --model mlp --optimizer sgd --batch_size 128 --log_every 1 --weight_decay 0 --eval_every 100"
    )
    recipe = fork(tmp_path / "run", "ddp", MNIST, arguments)
    assert largest_difference(recipe.column("train/loss"), losses(script)) <= 1e-5
    exact = losses(plain(tmp_path, SCRIPT, FLAGS.replace("--max_grad_norm 0.05", "")))
    assert largest_difference(exact, losses(script)) > 1e-3  # the clipping changes the losses


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("ddp", 2),
        ("fsdp2", 2),
        ("ddp", 4),
        ("fsdp2", 4),
        ("deepspeed_zero2", 2),
    ],
)
def test_resumes_exactly_and_exports(tmp_path: Path, config: str, num_processes: int) -> None:
    flags = f"{FLAGS} --optimizer adamw --learning_rate 0.01"
    reference = plain(tmp_path, SCRIPT, f"{flags} --output_dir {tmp_path}/one")
    flags += " --accumulate 2"
    whole = under(tmp_path, config, num_processes, f"{flags} --output_dir {tmp_path}/run --save_every 13")
    assert largest_difference(losses(whole), losses(reference)) <= 1e-5
    resumed = under(
        tmp_path, config, num_processes, f"{flags} --resume {tmp_path}/run/step_13 --output_dir {tmp_path}/resumed"
    )
    # With more than two processes the order of sums depends on DDP's buckets, which it divides anew in its second step.
    tolerance = 0.0 if num_processes == 2 else 1e-5
    assert largest_difference(losses(resumed), losses(whole)[13:]) <= tolerance
    exported = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "run", "resumed")]
    for name, weight in exported[0].items():
        assert (exported[1][name] - exported[2][name]).abs().max() <= tolerance
        assert (exported[1][name] - weight).abs().max() <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--accumulate 3", "--accumulate 3 does not divide the batch of 128"),
        ("--save_every 5", "--save_every needs --output_dir"),
        ("--resume missing", "no folder missing"),
    ],
)
def test_bad_combinations(tmp_path: Path, arguments: str, message: str) -> None:
    command = [sys.executable, str(PLAIN / SCRIPT), *arguments.split()]
    run = execute(command, tmp_path, tmp_path)
    assert run.exit_code == 2 and message in run.stderr.splitlines()[-1]


def distance(run: Run) -> float:
    """The distance to the closed form that linear_regression.py prints."""
    return float(re.search(r"^distance to the closed form (\S+)", run.stdout, re.MULTILINE)[1])


@pytest.mark.full
def test_linear_regression_with_unequal_shares(tmp_path: Path) -> None:
    """3 processes share batches of 10 samples: 4, 3 and 3."""
    one, three = (plain(tmp_path, "linear_regression.py", num_processes=n) for n in (1, 3))
    assert largest_difference(losses(three), losses(one)) <= 1e-5
    assert distance(three) == pytest.approx(distance(one), abs=2e-6) and 0.4 < distance(one) < 0.5


@pytest.mark.full
def test_linear_regression_reaches_the_closed_form(tmp_path: Path) -> None:
    assert distance(plain(tmp_path, "linear_regression.py", "--steps 1000", num_processes=2)) < 1e-3


@pytest.mark.full
def test_linear_regression_with_the_mistake(tmp_path: Path) -> None:
    right, wrong = (
        plain(tmp_path, "linear_regression.py", m, num_processes=4) for m in ("", "--mistake mean_of_means")
    )
    assert largest_difference(losses(wrong), losses(right)) > 1e-3
