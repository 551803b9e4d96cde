"""Promise: a mistake in what a user brings is one line that says what to type, and what is right trains as it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.draw import drawn
from support.launching import fork
from support.recipes import USERS
from support.runs import Run, assert_same_result, largest_difference, refused

STEPS = "--hang_timeout 20"


def refused_before_training(folder: Path, config: str, arguments: str) -> str:
    run = fork(folder / "run", config, USERS, f"{STEPS} {arguments}", succeeds=False)
    line = refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists() or run.records == []
    assert not (run.output_dir / "model").exists()
    return line


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("step column", '"loss" has shape (2, 1): expected (2,), one value per example; use .squeeze(-1)'),
        (
            "step square",
            '"loss" has shape (2, 2): expected (2,), one value per example; use .squeeze(-1) on the model',
        ),
        ("step mean", '"loss" has shape (): expected (2,), one value per example; use reduction="none"'),
        ("step values_of_tokens", '"loss" has shape (2, 6): expected (2,), one value per example; use .flatten(1)'),
        ("step no_loss", 'forward_step returns error: expected a dict with "loss" of shape (2,)'),
        ("step no_dict", 'forward_step returns Tensor: expected a dict with "loss" of shape (2,)'),
        ("step metric", '"accuracy" has shape (): expected (2,)'),
        ("step number", '"accuracy" is a float: expected a tensor of shape (2,)'),
        ("step detached", '"loss" has no gradient: compute it from the model output'),
        ("set tuples", "samples have the type tuple: expected dicts"),
        ("set tensors", "samples have the type Tensor: expected dicts"),
        ("set none", '"z" is None in a sample: expected a tensor, number or string'),
        ("set other_names", '"z" is not in each sample'),
        ("set column_of_weights", '"weight" of a batch has shape (1, 1): expected (1,), one number per sample'),
        ("optimizer strange_weight", "the optimizer was given a weight of shape (3,) that is not in Net"),
        ("optimizer tensor_rate", "AdamW has a tensor as learning rate: give it a float"),
    ],
)
def test_mistake_is_named(tmp_path: Path, mistake: str, expected: str) -> None:
    assert expected in refused_before_training(tmp_path, "single", f"--{mistake}")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_several_lengths_are_named(tmp_path: Path, num_workers: int) -> None:
    line = refused_before_training(tmp_path, "single", f"--set unequal --num_workers {num_workers}")
    problem = 'error: "x" has shape (15,) in one sample and (16,) in another: pad them to one shape, or use '
    assert line == problem + "collate_fn=pad_to_longest() in the call of fit"


@pytest.mark.parametrize(
    ("config", "mistake"), drawn(("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"), ("mean", "column"))
)
def test_shape_is_checked_under_each_config(tmp_path: Path, config: str, mistake: str) -> None:
    assert '"loss" has shape' in refused_before_training(tmp_path, config, f"--step {mistake}")


APART = {
    "model other_in_each_process": "the weight stem.",
    "set length_by_rank": "the length of the training set",
    "set sample_by_rank": "sample 0 of the",
}


@pytest.mark.parametrize(("config", "mistake"), drawn(("ddp", "fsdp2", "deepspeed_zero3"), tuple(APART)))
def test_processes_that_start_apart(tmp_path: Path, config: str, mistake: str) -> None:
    line = refused_before_training(tmp_path, config, f"--{mistake}")
    assert f"process 1 starts with a different value of {APART[mistake]}" in line


@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_weights_that_the_optimizer_was_not_given_are_frozen(
    tmp_path: Path, reference: Callable[..., Run], config: str
) -> None:
    arguments = f"{STEPS} --optimizer head_only"
    run = fork(tmp_path / "run", config, USERS, arguments)
    assert_same_result(run, reference(USERS, f"{arguments} --model all_but_head_frozen"))
    line = " of 2,497 weights; frozen, because they are not in the optimizer: blocks (2,208) and 1 more"
    assert run.stdout.count(line) == 1


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_model_knows_in_evaluation_that_it_is_one(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    """The model adds noise in training. The weights stay the same: the rate is tiny."""
    arguments = f"{STEPS} --learning_rate 1e-30 --check_steps 0"  # the noise has a generator of its own
    run = fork(tmp_path / "run", config, USERS, f"{arguments} --model knows_the_mode")
    expected = reference(USERS, arguments)
    assert largest_difference(run.column("eval/loss"), expected.column("eval/loss")) <= 1e-5
    assert abs(run.column("train/loss")[0] - expected.column("train/loss")[0]) > 1e-3


@pytest.mark.parametrize(
    ("config", "dtype"),
    [("single", "bfloat16"), ("ddp", "bfloat16"), ("deepspeed_zero2_bf16", "float32"), ("fsdp2_bf16", "float32")],
)
def test_weights_are_exported_in_the_precision_in_which_they_are_trained(
    tmp_path: Path, config: str, dtype: str
) -> None:
    run = fork(tmp_path / "run", config, USERS, f"{STEPS} --model bf16_weights")
    assert {str(weight.dtype) for weight in run.weights.values()} == {f"torch.{dtype}"}
    line = "trains and exports this model's bfloat16 weights in float32"
    assert run.stdout.count(line) == (dtype == "float32")


def test_dropout_is_said_to_depend_on_the_micro_batch_size(tmp_path: Path) -> None:
    line = "draws random numbers, such as dropout: they depend on --micro_batch_size, here 4, not on"
    arguments = f"{STEPS} --model dropout --micro_batch_size"
    alone = fork(tmp_path / "single", "single", USERS, f"{arguments} 8")
    two = fork(tmp_path / "ddp", "ddp", USERS, f"{arguments} 4")
    assert (alone.stdout.count(line), two.stdout.count(line)) == (0, 1)
    assert largest_difference(two.column("train/loss"), alone.column("train/loss")) > 1e-5  # they do depend on it
