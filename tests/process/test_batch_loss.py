"""Promise: a loss that compares samples sees the whole batch: the result is that of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_recipes.matrix import PIPELINES
from support.launching import fork
from support.recipes import BF16_CONFIGS, FLOAT32_CONFIGS
from support.runs import Run, assert_same_result, largest_difference, refused

CONTRAST = "tests/scripts/contrast.py"  # a batch of 32
DATA_PARALLEL = {
    "single": 1,
    "tensor_parallel": 1,
    "hsdp": 4,
    "hsdp_tensor_parallel": 4,
}  # ranks with samples of their own; 2 under the others


def cases() -> list[Any]:
    """(config, accumulation); `make test-full` runs all."""
    refuse = (*PIPELINES, "sequence_parallel", "fsdp2_sequence_parallel")
    configs = [config for config in FLOAT32_CONFIGS if config not in refuse]
    shards = ("fsdp2", "hsdp", "tensor_parallel", "deepspeed_zero3")
    often = {("single", 4), ("ddp", 4), ("tensor_parallel", 1), *((config, 2) for config in shards)}
    return [
        pytest.param(config, count, marks=[] if (config, count) in often else pytest.mark.full)
        for config in configs
        for count in (1, 2, 4)
    ]


@pytest.mark.parametrize(("config", "accumulation"), cases())
def test_result_is_that_of_one_micro_batch(
    tmp_path: Path, reference: Callable[..., Run], config: str, accumulation: int
) -> None:
    size = 32 // DATA_PARALLEL.get(config, 2) // accumulation
    run = fork(tmp_path / "run", config, CONTRAST, f"--micro_batch_size {size}")
    assert run.card["gradient_accumulation_steps"] == accumulation
    assert run.card["checked_steps"] == (0 if config == "single" else 2)
    expected = reference(CONTRAST, "")
    assert_same_result(run, expected)
    assert largest_difference(run.column("train/accuracy"), expected.column("train/accuracy")) < 1e-12


@pytest.mark.parametrize("config", BF16_CONFIGS)
def test_result_in_bf16_is_close(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    expected = reference(CONTRAST, "", "--mixed_precision bf16")
    run = fork(tmp_path / "run", config, CONTRAST, "--micro_batch_size 8")
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) < 0.01


def test_a_loss_may_write_its_values(tmp_path: Path, reference: Callable[..., Run]) -> None:
    run = fork(tmp_path / "run", "ddp", CONTRAST, "--mistake writes --micro_batch_size 8")
    assert_same_result(run, reference(CONTRAST, "--mistake centres"))


def test_both_passes_draw_the_same(tmp_path: Path, reference: Callable[..., Run]) -> None:
    flags = "--dropout 0.3 --micro_batch_size 8"
    run = fork(tmp_path / "run", "ddp", CONTRAST, flags)
    assert_same_result(run, reference(CONTRAST, flags))
    without = reference(CONTRAST, "")
    assert largest_difference(run.column("train/loss"), without.column("train/loss")) > 1e-3  # it does drop


def test_first_pass_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", CONTRAST, "--counts --micro_batch_size 8")
    assert run.weights["calls"].item() == 6 * 2  # steps × micro-batches


@pytest.mark.full
def test_memory_grows_with_the_values_and_not_with_the_activations(tmp_path: Path) -> None:
    peaks = []
    for flags in (
        "--batch_size 64 --micro_batch_size 16",
        "--batch_size 1024 --micro_batch_size 16",
        "--batch_size 1024",
    ):
        run = fork(tmp_path / f"run{len(peaks)}", "single", CONTRAST, f"{flags} --width 65536 --max_steps 1")
        peaks.append(int(run.stdout.rpartition("peak ")[2].split()[0]))
    few, many, whole = peaks  # in MiB; one pass of the whole batch has 512 MiB of activations
    assert many - few < 150 and whole - few > 500


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("loss", "forward_step returns loss: with batch_loss, expected a dict of its inputs, such as vectors of"),
        ("mean", '"left" has shape (): expected a tensor of shape (8, ...); expand values that all samples share'),
        ("detached", "left, right, scale: none has a gradient: compute them from the model output"),
        ("scalar", '"loss" has shape (): expected (32,), one value per example; use reduction="none"'),
        ("outside", "batch_loss uses a weight of shape (1,) that is not among its values: return it from the model"),
        ("noise", '"left" differs when forward_step is called again for the same batch, and batch_loss needs two'),
    ],
)
def test_mistake_is_named(tmp_path: Path, mistake: str, expected: str) -> None:
    flags = f"--mistake {mistake} --micro_batch_size 8"
    assert expected in refused(fork(tmp_path / "run", "single", CONTRAST, flags, succeeds=False))


def test_stages_of_a_pipeline_take_both_passes(tmp_path: Path, reference: Callable[..., Run]) -> None:
    flags = "--num_layers 4"
    run = fork(tmp_path / "run", "pipeline_parallel", CONTRAST, f"{flags} --pipeline_stages 2 --micro_batch_size 8")
    expected = reference(CONTRAST, flags)
    assert_same_result(run, expected)
    assert largest_difference(run.column("train/accuracy"), expected.column("train/accuracy")) < 1e-12
