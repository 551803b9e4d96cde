"""Promise: with `--exact_dropout`, a model with dropout has one result for every layout and micro-batch size."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from support.launching import fork
from support.runs import Run, largest_difference, refused

DROPPING = "tests/scripts/dropping.py"
EXACT = "--exact_dropout"
COURSE = "--max_steps 6 --save_every 2 --keep_checkpoints 9"
WIDE = "--same_length"  # as a pipeline needs
TOLERANCE = 1e-6


def cell(config: str, flags: str, num_processes: int = 2, normal: bool = False) -> object:
    return pytest.param(config, flags, num_processes, marks=[] if normal else pytest.mark.full)


NORMAL = [
    cell("ddp", "--model bert --micro_batch_size 2 --checkpointing plain", normal=True),
    cell("fsdp2", "--model gpt2", normal=True),
    cell("tensor_parallel", "--model blocks --checkpointing reentrant", normal=True),
]
FULL = [
    cell(config, f"--model {model} {flags}", num_processes)
    for model, (config, num_processes, flags) in product(
        ("blocks", "bert", "gpt2", "llama"),
        (
            ("single", 1, "--micro_batch_size 1"),
            ("single", 1, "--micro_batch_size 4 --checkpointing plain"),
            ("single", 1, "--checkpointing reentrant"),
            ("ddp", 2, "--checkpointing plain"),
            ("ddp", 4, "--micro_batch_size 1"),
            ("fsdp2", 2, "--micro_batch_size 2 --checkpointing plain"),
            ("hsdp", 4, ""),
            ("deepspeed_zero1", 2, ""),
            ("deepspeed_zero2", 2, "--micro_batch_size 2"),
            ("deepspeed_zero3", 2, "--micro_batch_size 1"),
        ),
    )
]
DIVIDED = [
    cell("tensor_parallel", "--model blocks --micro_batch_size 2"),
    cell("fsdp2_tensor_parallel", "--model blocks --micro_batch_size 1", 4),
    cell("tensor_parallel", "--model bert --micro_batch_size 2 --checkpointing plain"),
    cell("tensor_parallel", "--model bert --attention eager"),
    cell("tensor_parallel", "--model llama"),
    cell("tensor_parallel", "--model llama --attention eager --checkpointing plain --micro_batch_size 4"),
    cell("fsdp2_tensor_parallel", "--model llama", 4),
    cell("pipeline_parallel", f"--model llama {WIDE} --pipeline_stages 2 --micro_batch_size 2"),
    cell(
        "pipeline_parallel", f"--model llama {WIDE} --pipeline_stages 3 --micro_batch_size 1 --checkpointing plain", 3
    ),
    cell("pipeline_parallel", f"--model llama {WIDE} --pipeline_stages 2 --pipeline_schedule gpipe", 4),
    cell("single", "--model bert --attention eager", 1),
    cell("single", "--model gpt2 --attention eager --checkpointing plain", 1),
    cell("single", "--model llama --attention eager --micro_batch_size 2", 1),
]


def model_of(flags: str) -> str:
    """The flags that change the result."""
    return " ".join(flags.split()[:2] + [WIDE] * (WIDE in flags))


@pytest.mark.parametrize(("config", "flags", "num_processes"), NORMAL + FULL + DIVIDED)
def test_one_result_with_dropout(
    tmp_path: Path, reference: Callable[..., Run], config: str, flags: str, num_processes: int
) -> None:
    expected = reference(DROPPING, f"{COURSE} {EXACT} {model_of(flags)}")
    run = fork(tmp_path / "run", config, DROPPING, f"--max_steps 6 {EXACT} {flags}", num_processes)
    assert_close(run, expected)


def largest_step(run: Run, expected: Run) -> float:
    """Largest difference of an element of a weight. The elements are of the order of 0.1."""
    assert run.weights.keys() == expected.weights.keys()
    return max(float((run.weights[name] - weight).abs().max()) for name, weight in expected.weights.items())


def assert_close(run: Run, expected: Run, first: int = 0) -> None:
    """Compares a run with the steps from `first` of another."""
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")[first:]) <= TOLERANCE
    assert largest_difference(run.column("eval/loss")[-1:], expected.column("eval/loss")[-1:]) <= TOLERANCE
    assert largest_step(run, expected) <= TOLERANCE


def test_the_probability_changes_the_result(tmp_path: Path, reference: Callable[..., Run]) -> None:
    expected = reference(DROPPING, f"{COURSE} {EXACT} --model bert")
    other = fork(tmp_path / "other", "single", DROPPING, f"--max_steps 6 --model bert {EXACT} --p 0.21")
    assert largest_difference(other.column("train/loss"), expected.column("train/loss")) > 1e-3


@pytest.mark.parametrize(
    "model", ["blocks", *(pytest.param(name, marks=pytest.mark.full) for name in ("bert", "gpt2"))]
)
def test_without_the_flag_the_micro_batch_size_changes_the_result(tmp_path: Path, model: str) -> None:
    whole, parts = (
        fork(tmp_path / size, "single", DROPPING, f"--max_steps 6 --model {model} --micro_batch_size {size}")
        for size in ("8", "2")
    )
    assert largest_difference(parts.column("train/loss"), whole.column("train/loss")) > 1e-3
    assert largest_step(parts, whole) > 1e-3


@pytest.mark.parametrize(
    ("config", "flags", "num_processes"),
    [
        cell("ddp", "--model bert --micro_batch_size 1", normal=True),
        cell("fsdp2", "--model gpt2 --checkpointing plain"),
        cell("tensor_parallel", "--model blocks"),
        cell("pipeline_parallel", f"--model llama {WIDE} --pipeline_stages 2"),
    ],
)
def test_a_resume_in_another_layout_goes_on_with_the_same_masks(
    tmp_path: Path, reference: Callable[..., Run], config: str, flags: str, num_processes: int
) -> None:
    expected = reference(DROPPING, f"{COURSE} {EXACT} {model_of(flags)}")
    path = expected.output_dir / "checkpoints" / "step_00000004"
    arguments = f"--max_steps 6 {EXACT} {flags} --resume_from_checkpoint {path}"
    assert_close(fork(tmp_path / "run", config, DROPPING, arguments, num_processes), expected, first=4)


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        # Llama has no module of dropout: it drops in attention alone.
        pytest.param(
            "tensor_parallel", "", "has dropout between layers that tensor parallelism divides", marks=pytest.mark.full
        ),
        pytest.param(
            "pipeline_parallel", f"{WIDE} --pipeline_stages 2", "has dropout in a pipeline", marks=pytest.mark.full
        ),
        ("tensor_parallel", "--compile", "has dropout, which --compile does not support"),
    ],
)
def test_without_the_flag_divided_layers_with_dropout_are_refused(
    tmp_path: Path, config: str, flags: str, message: str
) -> None:
    run = fork(tmp_path / "run", config, DROPPING, f"--max_steps 1 --model llama {flags}", succeeds=False)
    assert message in refused(run) and not (tmp_path / "run" / "model").exists()


def test_a_resume_without_the_flag_is_refused(tmp_path: Path, reference: Callable[..., Run]) -> None:
    path = reference(DROPPING, f"{COURSE} {EXACT} --model bert").output_dir / "checkpoints" / "step_00000004"
    flags = f"--max_steps 6 --model bert --resume_from_checkpoint {path}"
    assert "was made with exact_dropout" in refused(fork(tmp_path / "run", "single", DROPPING, flags, succeeds=False))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model noise", "draws random numbers elsewhere"),
        ("--model expert --micro_batch_size 1", "whose first dimension is not the 1 samples"),
        *(
            pytest.param(flags, message, marks=pytest.mark.full)
            for flags, message in (
                ("--model expert", "whose first dimension is not the 8 samples"),
                ("--model transposed --same_length", "whose first dimension is not the 8 samples"),
                ("--model transposed --micro_batch_size 1", "whose second dimension may be the 1 samples"),
                ("--model weight", "whose first dimension is not the 8 samples"),
                ("--model lstm", "lstm (LSTM) has dropout between its layers"),
                ("--model dropout2d", "does not know the dropout of spare (Dropout2d)"),
                ("--model time_first", "build it with batch_first=True"),
                ("--model blocks --compile", "does not work with --compile"),
                ("--model blocks --checkpointing forgetful", "remove preserve_rng_state=False"),
            )
        ),
    ],
)
def test_what_cannot_be_equal_is_refused(tmp_path: Path, flags: str, message: str) -> None:
    run = fork(tmp_path / "run", "single", DROPPING, f"--max_steps 6 {EXACT} {flags}", succeeds=False)
    assert message in refused(run) and not (tmp_path / "run" / "model").exists()


@pytest.mark.full
def test_a_pipeline_refuses_dropout_around_its_layers(tmp_path: Path) -> None:
    flags = f"--max_steps 6 {EXACT} --model around {WIDE} --pipeline_stages 2"
    run = fork(tmp_path / "run", "pipeline_parallel", DROPPING, flags, 2, succeeds=False)
    assert "has dropout outside model.layers." in refused(run)
