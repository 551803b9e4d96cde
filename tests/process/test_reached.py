"""Promise: a run says what is frozen, and names weights that no gradient reaches, and no others."""

from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import DIFFUSION, FINETUNE
from support.small_model import write_model

UNREACHED = "tests/scripts/unreached.py"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ("single", "--optimizer SGD"),
        ("ddp", ""),
        ("fsdp2", "--optimizer SGD"),
        ("tensor_parallel", ""),
        ("deepspeed_zero2", ""),
        ("deepspeed_zero3", ""),
    ],
)
def test_a_layer_without_gradient_is_named(tmp_path: Path, config: str, flags: str) -> None:
    run = fork(tmp_path / "run", config, UNREACHED, flags)
    frozen = "frozen: frozen (72); frozen, because they are not in the optimizer: left (72)"
    assert run.stdout.count(f"trainable: 528 of 672 weights; {frozen}\n") == 1
    line = "up to step 11 the gradient of rounded.weight, ... is zero in each record, so nothing trains it"
    assert run.stdout.count("is zero in each record") == run.stdout.count(line) == 1
    assert run.card["without_gradient"] == ["rounded.weight", "rounded.bias"] and "not_moved" not in run.card
    assert (run.card["num_weights"], run.card["num_trained_weights"]) == (672, 528)


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_a_layer_that_no_step_moves_is_named(tmp_path: Path, config: str) -> None:
    run = fork(tmp_path / "run", config, UNREACHED, "--left_out")
    assert run.stdout.count("no step up to 11 has changed inner.weight, ...: the optimizer leaves it out") == 1
    assert run.card["not_moved"] == ["inner.weight", "inner.bias"]


def test_steps_that_move_nothing_any_more_are_said(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", UNREACHED, "--stops_at 6 --log_every 2")
    assert run.stdout.count("no weight has changed since step 6, at a learning rate of 0.001: the optimizer") == 1


def test_layers_that_start_at_zero_are_not_named(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", DIFFUSION, "--num_layers 1 --batch_size 8 --max_steps 12 --log_every 1")
    assert not {"without_gradient", "not_moved"} & run.card.keys() and "trainable:" not in run.stdout


def test_adapters_are_not_named_and_what_they_adapt_is_frozen(tmp_path: Path) -> None:
    write_model(tmp_path / "base", num_positions=64)
    flags = f"--model_name_or_path {tmp_path / 'base'} --lora_rank 2 --max_length 64 --batch_size 4"
    run = fork(tmp_path / "run", "single", FINETUNE, f"{flags} --max_steps 12 --log_every 1")
    assert not {"without_gradient", "not_moved"} & run.card.keys() and " weights; frozen: " in run.stdout
    assert 0 < run.card["num_trained_weights"] < run.card["num_weights"]
