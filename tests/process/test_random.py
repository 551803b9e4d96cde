"""Promise: random numbers in the data and the model do not depend on the number of processes or workers."""

from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import DISTURBED
from support.runs import TOLERANCE, Run, largest_difference, weight_distance

COURSE = "--max_steps 9 --log_every 1 --eval_every 4 --save_every 4 --keep_checkpoints 9 --batch_size 8"


def assert_close(run: Run, expected: Run) -> None:
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= TOLERANCE
    assert weight_distance(run, expected) <= TOLERANCE


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, four micro-batches of 2 samples per step; dropout, and noise from three generators."""
    return fork(tmp_path_factory.mktemp("alone") / "run", "single", DISTURBED, f"{COURSE} --micro_batch_size 2")


@pytest.mark.parametrize(
    ("config", "num_processes", "flags"),
    [
        ("ddp", 2, ""),
        ("ddp", 4, ""),
        ("fsdp2", 2, ""),
        ("deepspeed_zero2", 2, ""),
        pytest.param("deepspeed_zero3", 2, "", marks=pytest.mark.full),
        pytest.param("hsdp", 4, "", marks=pytest.mark.full),
        ("single", 1, "--num_workers 2"),
        pytest.param("ddp", 2, "--num_workers 1", marks=pytest.mark.full),
    ],
)
def test_dropout_and_random_data_are_the_same_at_one_micro_batch_size(
    tmp_path: Path, alone: Run, config: str, num_processes: int, flags: str
) -> None:
    run = fork(tmp_path / "run", config, DISTURBED, f"{COURSE} --micro_batch_size 2 {flags}", num_processes)
    assert_close(run, alone)
    assert len(set(alone.column("train/loss"))) == 9  # the noise changes from step to step


def test_random_data_is_the_same_at_any_micro_batch_size(tmp_path: Path) -> None:
    flags = f"{COURSE} --dropout 0"
    one = fork(tmp_path / "one", "single", DISTURBED, flags)
    assert_close(fork(tmp_path / "two", "ddp", DISTURBED, f"{flags} --micro_batch_size 1"), one)
    other = fork(tmp_path / "other", "single", DISTURBED, f"{flags} --seed 1")
    assert largest_difference(other.column("train/loss"), one.column("train/loss")) > 1e-3


def test_random_numbers_go_on_in_another_layout(tmp_path: Path, alone: Run) -> None:
    path = alone.output_dir / "checkpoints" / "step_00000004"
    flags = f"{COURSE} --micro_batch_size 2 --num_workers 1 --resume_from_checkpoint {path}"
    run = fork(tmp_path / "run", "ddp", DISTURBED, flags)
    assert largest_difference(run.column("train/loss"), alone.column("train/loss")[4:]) <= TOLERANCE
    assert weight_distance(run, alone) <= TOLERANCE
