"""Promise: when the first steps of a run are not those of one process, the lines name the module where that begins."""

from pathlib import Path

import pytest

from support.launching import fork

FAULTY = "tests/scripts/faulty.py"
MODULE = "model.layers.2.mlp.down_proj"
STAGES = {"pipeline_parallel": " --pipeline_stages 2"}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("ddp", "forward"),
        ("ddp", "backward"),
        ("fsdp2", "backward"),
        ("tensor_parallel", "forward"),
        ("tensor_parallel", "backward"),
        ("sequence_parallel", "forward"),
        ("sequence_parallel", "backward"),
        ("pipeline_parallel", "forward"),
        ("pipeline_parallel", "backward"),
        ("deepspeed_zero2", "backward"),
        ("deepspeed_zero3", "forward"),
    ],
)
def test_the_module_is_named(tmp_path: Path, config: str, fault: str) -> None:
    arguments = f"--fault {fault} --module {MODULE}{STAGES.get(config, '')}"
    arguments += " --pipeline_schedule zbv" * (config in STAGES and fault == "forward")  # the second stage of process 1
    run = fork(tmp_path / "run", config, FAULTY, arguments, succeeds=False)
    assert run.exit_code == 2 and f"  first difference: {MODULE} (Linear), {fault}, " in run.stderr, run.stderr
    size = float(run.stderr.partition(f"{fault}, ")[2].partition(" of its size")[0])
    assert size == pytest.approx(0.01, rel=0.25) and "all samples of process " in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("config", "fault", "line"),
    [
        ("ddp", "gradient", f"first difference: the gradient of {MODULE}.weight, 6.5e-03 of its size"),
        ("pipeline_parallel", "gradient", f"first difference: the gradient of {MODULE}.weight, 1.0e-02 of its size"),
        ("ddp", "gradients", "first difference: each gradient is 2 times that on one process"),
        ("ddp", "update", f"process 1's {MODULE}.weight differs from the processes before it"),
        ("ddp", "loss", "all modules agree: forward_step computes the difference"),
        (
            "ddp",
            "one_sample",
            f"first difference: {MODULE} (Linear), forward, 6.6e-03 of its size, sample 35 of process 1",
        ),
    ],
)
def test_what_is_no_module_is_named(tmp_path: Path, config: str, fault: str, line: str) -> None:
    module = MODULE if fault == "one_sample" else f"{MODULE}.weight"
    arguments = f"--fault {fault} --module {module}{STAGES.get(config, '')}"
    run = fork(tmp_path / "run", config, FAULTY, arguments, succeeds=False)
    assert run.exit_code == 2 and line in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("config", "factor"),
    [("ddp", 0.5), ("fsdp2", 0.5), ("fsdp2_sequence_parallel", 0.5), ("fsdp2_sequence_parallel", 2)],
)
def test_a_factor_of_a_group_is_found(tmp_path: Path, config: str, factor: float) -> None:
    """Also where the processes that share samples, or tokens, are as many."""
    run = fork(tmp_path / "run", config, FAULTY, f"--fault scale --by {factor}", succeeds=False)
    expected = f"first difference: the gradient of the loss, {abs(factor - 1):.1e} of its size"
    assert run.exit_code == 2 and expected in run.stderr, run.stderr


def test_bf16_names_the_module(tmp_path: Path) -> None:
    arguments = f"--fault forward --module {MODULE} --by 30"
    run = fork(tmp_path / "run", "ddp", FAULTY, arguments, options="--mixed_precision bf16", succeeds=False)
    assert run.exit_code == 2 and f"first difference: {MODULE} (Linear), forward, " in run.stderr, run.stderr
