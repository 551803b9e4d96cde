"""Promise: a run that was stopped goes on as if nothing had been; nothing is overwritten unasked."""

from pathlib import Path

import pytest

from launching import Run, largest_difference, launch, weight_distance
from test_guards import refused

MNIST = "recipes/mnist.py"
STEPS = "--max_steps 12 --log_every 1 --eval_every 4 --save_every 4 --lr_schedule cosine"

pytestmark = pytest.mark.xdist_group("test_checkpoint")


@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2"])
def test_resumed_run_goes_on_as_the_undisturbed_one(tmp_path: Path, config: str) -> None:
    whole = launch(tmp_path / "whole", config, MNIST, STEPS)
    stopped = tmp_path / "whole" / "checkpoints"
    assert sorted(path.name for path in stopped.iterdir()) == ["step_00000008", "step_00000012"]
    resumed = launch(
        tmp_path / "resumed", config, MNIST, f"{STEPS} --resume_from_checkpoint {stopped / 'step_00000008'}"
    )
    assert f"resumed from {stopped / 'step_00000008'}" in resumed.stdout
    rest = [record for record in whole.records if record["step"] > 8]
    timed = "samples_per_second"
    assert [{k: v for k, v in r.items() if k != timed} for r in resumed.records] == [
        {k: v for k, v in r.items() if k != timed} for r in rest
    ]
    assert weight_distance(resumed, whole) == 0


def test_checkpoint_of_one_config_loads_under_another(tmp_path: Path) -> None:
    steps = f"{STEPS} --model mlp"
    whole = launch(tmp_path / "whole", "fsdp2_tensor_parallel", MNIST, steps)
    path = tmp_path / "whole" / "checkpoints" / "step_00000008"
    for config in ("single", "hsdp", "fsdp2_tensor_parallel"):
        run = launch(tmp_path / config, config, MNIST, f"{steps} --resume_from_checkpoint {path}")
        assert largest_difference(run.column("train/loss"), whole.column("train/loss")[8:]) <= 1e-5
        assert weight_distance(run, whole) <= 1e-5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return launch(tmp_path_factory.mktemp("finished") / "run", "single", MNIST, STEPS)


def test_started_again_without_a_word_loses_nothing(finished: Run) -> None:
    card = finished.card
    line = refused(launch(finished.output_dir, "single", MNIST, STEPS, succeeds=False))
    assert "type --resume_from_checkpoint latest to go on, --overwrite_output_dir to start over" in line
    assert Run(0, "", "", finished.output_dir).card == card


def test_resuming_a_finished_run_says_so(finished: Run) -> None:
    run = launch(finished.output_dir, "single", MNIST, f"{STEPS} --resume_from_checkpoint latest")
    assert "nothing to do" in run.stdout and run.card["status"] == "done"
    assert run.column("train/loss") == finished.column("train/loss")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--seed 1", "was made with seed 0, this run has 1"),
        ("--batch_size 32", "was made with batch_size 64, this run has 32"),
        ("--ema_decay 0.9", "was made with ema_decay 0.0, this run has 0.9"),
        ("--model mlp", "is of another model"),
    ],
)
def test_resuming_as_another_run_is_refused(finished: Run, arguments: str, expected: str) -> None:
    arguments = f"{STEPS.replace('12', '20')} --resume_from_checkpoint latest {arguments}"
    assert expected in refused(launch(finished.output_dir, "single", MNIST, arguments, succeeds=False))


def test_latest_without_a_checkpoint_starts_fresh(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "ddp", MNIST, "--max_steps 2 --resume_from_checkpoint latest")
    assert "a fresh start" in run.stdout and run.card["attempt"] == 1


def test_overwriting_starts_over(tmp_path: Path) -> None:
    launch(tmp_path / "run", "single", MNIST, STEPS)
    run = launch(tmp_path / "run", "single", MNIST, "--max_steps 2 --log_every 1 --overwrite_output_dir")
    assert run.column("train/loss") and len(run.column("train/loss")) == 2
    assert not (run.output_dir / "checkpoints").exists()
