"""Promise: nothing is overwritten without a flag, and no run goes on as another one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.launching import fork, launch
from support.recipes import COURSE, DISTURBED, LATEST, LINEAR, MNIST
from support.runs import ROOT, Run, refused

STEPS = "--max_steps 12 --log_every 1 --eval_every 4 --save_every 4 --lr_schedule cosine"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fork(tmp_path_factory.mktemp("finished") / "run", "single", MNIST, STEPS)


@pytest.mark.full
def test_launcher_does_not_start_again_as_another_run(tmp_path: Path) -> None:
    """With --overwrite_output_dir, the first attempt dies before it replaces the earlier run."""
    launch(tmp_path / "run", "single", DISTURBED, f"{COURSE} --seed 1")
    script = tmp_path / "dies_once.py"
    script.write_text(
        "import os, pathlib, runpy, signal\n"
        f"marker = pathlib.Path({str(tmp_path)!r}) / 'died'\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"runpy.run_path({str(ROOT / DISTURBED)!r}, run_name='__main__')\n"
    )
    flags = f"{COURSE} --seed 1 --overwrite_output_dir"
    run = launch(tmp_path / "run", "ddp", script, flags, options="--max_restarts 1")
    assert (tmp_path / "died").exists() and (run.card["attempt"], run.card["num_processes"]) == (1, 2), run.stdout


def test_finished_run_without_a_checkpoint_is_not_made_again(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", DISTURBED, "--max_steps 4")
    again = fork(tmp_path / "run", "single", DISTURBED, f"--max_steps 4 {LATEST}")
    assert "nothing to do" in again.stdout and again.card == run.card
    longer = fork(tmp_path / "run", "single", DISTURBED, f"--max_steps 6 {LATEST}")
    assert longer.records[-1]["step"] == 6


def test_folder_with_checkpoints_of_another_run_is_not_mixed(tmp_path: Path, finished: Run) -> None:
    run = fork(tmp_path / "run", "single", MNIST, "--max_steps 4 --save_every 2")
    path = finished.output_dir / "checkpoints" / "step_00000012"
    flags = f"--max_steps 16 --save_every 2 --resume_from_checkpoint {path}"
    line = refused(fork(run.output_dir, "single", MNIST, flags, succeeds=False))
    assert "holds checkpoints of a different run than" in line and run.checkpoints == [2, 4]
    (run.output_dir / "checkpoints" / "step_00000004.bak").mkdir()
    over = fork(run.output_dir, "single", MNIST, f"{flags} --overwrite_output_dir")
    assert over.checkpoints[-1] == 16 and 4 not in over.checkpoints
    assert (run.output_dir / "checkpoints" / "step_00000004.bak").exists()


def test_started_again_without_a_word_loses_nothing(finished: Run) -> None:
    card = finished.card
    line = refused(fork(finished.output_dir, "single", MNIST, STEPS, succeeds=False))
    assert "use --resume_from_checkpoint latest to continue, --overwrite_output_dir to start over" in line
    assert Run(0, "", "", finished.output_dir).card == card


def test_resuming_a_finished_run_says_so(finished: Run) -> None:
    run = fork(finished.output_dir, "single", MNIST, f"{STEPS} {LATEST}")
    assert "nothing to do" in run.stdout and run.card["status"] == "done"
    assert run.column("train/loss") == finished.column("train/loss")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--seed 1", "was made with seed 0, this run has 1"),
        pytest.param("--batch_size 32", "was made with batch_size 64, this run has 32", marks=pytest.mark.full),
        pytest.param("--ema_decay 0.9", "was made with ema_decay 0.0, this run has 0.9", marks=pytest.mark.full),
        ("--optimizer sgd", "was made with optimizer AdamW, this run has SGD"),
        ("--model mlp", "holds a different model"),
    ],
)
def test_resuming_as_another_run_is_refused(finished: Run, arguments: str, expected: str) -> None:
    arguments = f"{STEPS} --max_steps 20 {LATEST} {arguments}"
    assert expected in refused(fork(finished.output_dir, "single", MNIST, arguments, succeeds=False))


def test_resuming_with_more_or_fewer_steps_says_what_it_does(tmp_path: Path) -> None:
    flags = "--model mlp --lr_schedule constant --save_every 2"
    fork(tmp_path / "run", "single", MNIST, f"{flags} --max_steps 4")
    longer = fork(tmp_path / "run", "single", MNIST, f"{flags} --max_steps 6 {LATEST}")
    assert "resumed from" in longer.stdout and "another curve" not in longer.stdout
    path = longer.output_dir / "checkpoints" / "step_00000006"
    fewer = fork(tmp_path / "fewer", "single", MNIST, f"{flags} --max_steps 3 --resume_from_checkpoint {path}")
    assert "the checkpoint is at step 6, and this run has 3 steps: nothing is left to train" in fewer.stdout


def test_latest_without_a_checkpoint_starts_fresh(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MNIST, f"--max_steps 2 {LATEST}")
    assert "starting from scratch" in run.stdout and run.card["attempt"] == 1


@pytest.mark.parametrize("name", ["best/model.safetensors", "previous/best/x", "metrics.jsonl", "run.json"])
def test_what_a_run_would_replace_is_not_lost_unasked(tmp_path: Path, name: str) -> None:
    """Nor a folder of the user in `previous/`, with the flag."""
    held = tmp_path / "run" / name
    notes = tmp_path / "run" / "previous" / "notes.txt"
    for path in (held, notes):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"precious": 1}')
    for flags in ("", LATEST) if name.startswith("best") else ("",):
        line = refused(fork(tmp_path / "run", "single", LINEAR, f"--max_steps 2 {flags}", succeeds=False))
        assert f"holds {name.rpartition('/')[0] or name} of an earlier run: use --overwrite_output_dir" in line
        assert held.read_text() == '{"precious": 1}'
    over = fork(tmp_path / "run", "single", LINEAR, "--max_steps 2 --overwrite_output_dir")
    assert over.weights and notes.exists() and not (tmp_path / "run" / "previous" / "best").exists()


def test_model_of_an_earlier_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    """With --overwrite_output_dir, the earlier model is kept until the new run has exported a model."""
    first = fork(tmp_path / "run", "single", MNIST, "--max_steps 2")
    assert first.weights
    line = refused(fork(tmp_path / "run", "single", MNIST, "--max_steps 2", succeeds=False))
    assert "holds the model of an earlier run: use --resume_from_checkpoint latest" in line
    assert Run(0, "", "", first.output_dir).card == first.card
    flags = "--max_steps 3 --overwrite_output_dir"
    killed = fork(tmp_path / "run", "single", MNIST, f"{flags} --learning_rate 1e30", succeeds=False)
    assert killed.exit_code == 3 and not (killed.output_dir / "model").exists()
    kept = load_file(killed.output_dir / "previous" / "model" / "model.safetensors")
    assert all(torch.equal(kept[name], weight) for name, weight in first.weights.items())
    last = fork(tmp_path / "run", "single", MNIST, flags)
    assert last.records[-1]["step"] == 3 and last.weights and not (last.output_dir / "previous").exists()


def test_overwriting_starts_over(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    shutil.copytree(undisturbed("single", COURSE).output_dir, tmp_path / "run")
    run = fork(tmp_path / "run", "single", DISTURBED, "--max_steps 2 --log_every 1 --overwrite_output_dir")
    assert len(run.column("train/loss")) == 2 and run.checkpoints == []
