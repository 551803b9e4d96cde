"""Promise: --ema_decay evaluates and exports a moving average of the weights, and changes nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.launching import fork
from support.recipes import MNIST
from support.runs import Run, largest_difference

STEPS = "--max_steps 6 --log_every 1 --eval_every 2 --save_every 1 --keep_checkpoints 6"

pytestmark = pytest.mark.xdist_group("test_ema")


def averaged_by_hand(start: Run, run: Run, decay: float) -> dict:
    """Computes the averages from the weights in the checkpoint of each step. `start` has the initial weights, because
    its learning rate is nearly zero."""
    averages = start.weights
    for step in range(1, 7):
        saved = load_file(run.output_dir / "checkpoints" / f"step_{step:08d}" / "shard_00000.safetensors")
        weights = {name: saved[f"model.{name}"] for name in averages}
        now = min(decay, (1 + step) / (10 + step))
        averages = {name: now * averages[name] + (1 - now) * weights[name] for name in weights}
    return averages


@pytest.fixture(scope="module")
def expected(reference: Callable[..., Run]) -> dict:
    return averaged_by_hand(reference(MNIST, "--max_steps 1 --learning_rate 1e-30"), reference(MNIST, STEPS), decay=0.3)


@pytest.mark.parametrize(
    "config",
    [
        *("single", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"),
        *(pytest.param(config, marks=pytest.mark.full) for config in ("deepspeed_zero1", "deepspeed_zero3_offload")),
    ],
)
def test_average_is_evaluated_exported_and_resumed(
    tmp_path: Path, reference: Callable[..., Run], expected: dict, config: str
) -> None:
    plain = reference(MNIST, STEPS)
    run = fork(tmp_path / "run", config, MNIST, f"{STEPS} --ema_decay 0.3")
    # Training continues from the weights, not from the averages, also after evaluations.
    assert largest_difference(run.column("train/loss"), plain.column("train/loss")) <= 1e-5
    for name, average in expected.items():
        assert float((run.weights[name] - average).norm() / average.norm()) <= 1e-5
    assert largest_difference(run.column("eval/loss")[-1:], plain.column("eval/loss")[-1:]) > 1e-3
    checkpoint = run.output_dir / "checkpoints" / "step_00000003"
    resumed = fork(
        tmp_path / "resumed", config, MNIST, f"{STEPS} --ema_decay 0.3 --resume_from_checkpoint {checkpoint}"
    )
    assert resumed.column("eval/loss") == run.column("eval/loss")[1:]
    assert all((resumed.weights[name] == weight).all() for name, weight in run.weights.items())
