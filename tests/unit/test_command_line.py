"""Promise: what is typed wrong gets one line that says what to type instead."""

import re
from pathlib import Path

import pytest

from common.config import RunConfig, parse
from common.errors import UsageError
from common.launch import check_num_gpus


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--batch_size 0", "--batch_size 0: expected 1 or more"),
        ("--micro_batch_size=-4", "--micro_batch_size -4: expected 1 or more"),
        ("--epochs -1", "--epochs -1: expected 1 or more"),
        ("--max_steps 0", "--max_steps 0: expected 1 or more"),
        ("--learning_rate 0", "--learning_rate 0.0: expected more than 0"),
        ("--learning_rate nan", "--learning_rate nan: expected a finite number"),
        ("--max_grad_norm -1", "--max_grad_norm -1.0: expected 0 or more"),
        ("--epochs two", "--epochs: expected a whole number, got 'two'"),
        ("--lr_schedule banana", "--lr_schedule: invalid choice: 'banana'"),
        ("--epoch 2", "--epoch: no such flag; did you mean --epochs?"),
        ("--ema_decay 1", "--ema_decay 1.0: expected less than 1"),
        ("--seed 3000000000", "--seed 3000000000: expected less than 2147483648"),
        ("stray", "stray: no such flag; --help lists them"),
        ("--repeat nowhere/run.json", "--repeat nowhere/run.json is no run card"),
    ],
)
def test_command_line(arguments: str, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        parse(RunConfig, arguments.split())


@pytest.mark.parametrize("content", ["no JSON", "3", "[]", "{}", '{"config": 3}'])
def test_repeat_of_what_is_no_run_card(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=r"run\.json is no run card"):
        parse(RunConfig, ["--repeat", str(tmp_path / "run.json")])


def test_command_line_takes_dashes_and_underscores() -> None:
    config = parse(RunConfig, ["--batch-size=8", "--max_steps", "3", "--overwrite-output-dir"])
    assert (config.batch_size, config.max_steps, config.overwrite_output_dir) == (8, 3, True)


def test_more_processes_than_gpus() -> None:
    check_num_gpus(num_processes=2, num_gpus=8)
    with pytest.raises(UsageError, match="2 processes but 1 GPU on this machine: type --num_processes 1"):
        check_num_gpus(num_processes=2, num_gpus=1)
    with pytest.raises(UsageError, match="4 processes but 2 GPUs on this machine: type --num_processes 2"):
        check_num_gpus(num_processes=4, num_gpus=2)
