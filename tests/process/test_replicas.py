"""Promise: a run ends when processes that hold the same weights no longer agree, and names the weight."""

from pathlib import Path

import pytest

from support.launching import fork

DRIFTS, INEXACT = "tests/scripts/drifts.py", "tests/scripts/inexact.py"


@pytest.mark.parametrize(
    ("config", "num_processes", "weight", "others"),
    [
        ("ddp", 4, "norm.weight", "process 1 holds a different norm.weight than process 0"),
        ("hsdp", 4, "up.weight", "process 3 holds a different up.weight than process 1"),
        ("tensor_parallel", 2, "norm.weight", "process 1 holds a different norm.weight than process 0"),
        ("fsdp2_tensor_parallel", 4, "norm.bias", "process 1 holds a different norm.bias than process 0"),
    ],
)
def test_one_element_of_one_process_ends_the_run(
    tmp_path: Path, config: str, num_processes: int, weight: str, others: str
) -> None:
    run = fork(tmp_path / "run", config, DRIFTS, f"--weight {weight}", num_processes, succeeds=False)
    lines = [line for line in run.stderr.splitlines() if line.startswith("stopped: ")]
    assert len(lines) == 1 and f"stopped: after step 6 {others}, by " in lines[0], run.stderr
    assert (
        "they agreed after step 4" in lines[0] and f"{tmp_path}/run/checkpoints/step_00000004 to continue" in lines[0]
    )
    assert run.exit_code == run.card["exit_code"] == 3 and not (run.output_dir / "model").exists()
    assert run.checkpoints == [2, 4]


def test_rounding_of_other_processors_is_said_once(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", DRIFTS, "--by 1e-7")
    assert run.stdout.count("the processes round differently") == 1 and run.records[-1]["step"] == 9


@pytest.mark.parametrize("config", ["fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_a_run_without_a_fault_is_not_stopped(tmp_path: Path, config: str) -> None:
    run = fork(tmp_path / "run", config, DRIFTS, "--by 0")
    assert run.card["status"] == "done"


@pytest.mark.parametrize("config", ["tensor_parallel", "fsdp2_tensor_parallel"])
def test_processes_that_compute_a_gradient_inexactly_stay_together(tmp_path: Path, config: str) -> None:
    apart = fork(tmp_path / "apart", config, INEXACT, succeeds=False)
    assert "holds a different 0.weight than process" in apart.stderr and apart.exit_code == 3
    together = fork(tmp_path / "together", config, INEXACT, "--average")
    assert together.card["status"] == "done" and together.records[-1]["step"] == 4
