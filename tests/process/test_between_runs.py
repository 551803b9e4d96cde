"""Promise: nothing is lost between two runs, at a power loss, or when old checkpoints are removed."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from accelerate_recipes.common.checkpoint.reader import Reader
from accelerate_recipes.common.errors import RunError
from accelerate_recipes.common.records.output_dir import checkpoints
from support.launching import ACCELERATE_LAUNCH, CONFIGS, environment, execute, fork, until
from support.recipes import DISTURBED, LATEST, MNIST
from support.runs import ROOT, refused

COURSE = "--max_steps 6 --save_every 1"


@pytest.mark.parametrize("number", [50, pytest.param(0, marks=pytest.mark.full)])
def test_each_state_of_the_disk_resumes_to_the_truth(tmp_path: Path, number: int) -> None:
    """The script makes the states that kills and power losses leave, and resumes from them."""
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "disk_states.py"), str(number), str(time.time_ns())]
    run = execute(command, tmp_path, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert run.exit_code == 0, run.stdout + run.stderr
    drawn, every = (int(word) for word in run.stdout.split()[0:3:2])
    assert drawn == (number or every) and every > 600


def test_foreign_and_damaged_folders_do_not_evict_checkpoints(tmp_path: Path) -> None:
    first = fork(tmp_path / "run", "single", DISTURBED, COURSE)
    folder = first.output_dir / "checkpoints"
    for name in ("step_99999998", "step_99999999", "step_00000001"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("of the user")
    path = folder / "step_00000005"
    run = fork(first.output_dir, "single", DISTURBED, f"--max_steps 9 --save_every 1 --resume_from_checkpoint {path}")
    kept = {other.name for other in folder.glob("step_*") if (other / "manifest.json").exists()}
    assert kept == {"step_00000008", "step_00000009"} and (folder / "step_00000001" / "notes.txt").exists()
    assert run.card["status"] == "done"
    run = fork(first.output_dir, "single", DISTURBED, f"--max_steps 12 --save_every 1 {LATEST}")
    assert "resumed from" in run.stdout and "step_00000009" in run.stdout


def test_folder_that_cannot_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    first = fork(tmp_path / "run", "single", DISTURBED, COURSE)
    (first.output_dir / "checkpoints").rename(tmp_path / "away")
    (first.output_dir / "checkpoints").write_text("")  # a folder without permission gives another error in one place
    before = sorted(first.output_dir.rglob("*"))
    run = fork(first.output_dir, "ddp", DISTURBED, f"--max_steps 9 --save_every 1 {LATEST}", succeeds=False)
    assert run.exit_code == 1 and "checkpoints cannot be read (Not a directory): nothing was changed" in run.stderr
    assert sorted(first.output_dir.rglob("*")) == before


def test_error_while_reading_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fork(tmp_path / "run", "single", DISTURBED, COURSE)
    _, path = checkpoints(first.output_dir)[-1]

    def broken(self: Path, *arguments: object, **named: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(RunError, match=r"manifest\.json cannot be read \(Input/output error\): nothing was changed"):
        Reader(path)


def test_model_without_its_run_card_or_files_is_not_done(tmp_path: Path) -> None:
    first = fork(tmp_path / "run", "single", DISTURBED, COURSE)
    for name in ("model", "checkpoints"):
        (first.output_dir / name).rename(tmp_path / name)
    (first.output_dir / "metrics.jsonl").unlink()
    run = fork(first.output_dir, "single", DISTURBED, f"{COURSE} {LATEST}")
    assert "starting from scratch" in run.stdout and "nothing to do" not in run.stdout
    assert (run.output_dir / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("config", [pytest.param("single", marks=pytest.mark.full), "ddp"])
def test_launcher_that_is_killed_before_the_first_step_leaves_no_process(tmp_path: Path, config: str) -> None:
    command = [*ACCELERATE_LAUNCH, "--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0"]
    command += [str(ROOT / MNIST), "--epochs", "1000", "--output_dir", str(tmp_path / "run")]
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = psutil.Process(launcher.pid)
    until(lambda: len(started.children()) == (1 if config == "single" else 2))
    children = started.children()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    try:
        until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 60)
    finally:
        for child in children:
            if child.is_running():
                child.kill()


def test_altered_model_is_not_evaluated(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", MNIST, "--max_steps 2 --model mlp")
    path = run.output_dir / "model" / "model.safetensors"
    weights = load_file(path)
    weights["1.weight"][0, 0] += 1
    save_file(weights, path, {"format": "pt"})
    for flags in ("--evaluate_only --model mlp", f"--predict {tmp_path / 'none.png'}"):
        line = refused(fork(run.output_dir, "single", MNIST, flags, succeeds=False))
        assert "were altered after its run" in line or "use the path of an image" in line
    path.write_bytes(path.read_bytes()[:100])
    line = refused(fork(run.output_dir, "single", MNIST, "--evaluate_only --model mlp", succeeds=False))
    assert "no exported model in" in line


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    run = fork(tmp_path / "run", "ddp", DISTURBED, COURSE)
    paths = [*run.output_dir.rglob("*.safetensors"), run.output_dir / "run.json"]
    assert len(paths) >= 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o666 & ~mask}


def test_leftovers_of_a_killed_process_are_cleaned(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "run.json.123").write_text(json.dumps({}))
    (tmp_path / "run" / "checkpoints" / "unfinished_x").write_text("a file")
    run = fork(tmp_path / "run", "single", DISTURBED, COURSE)
    assert run.checkpoints == [5, 6] and not list(run.output_dir.glob("run.json.*"))
    assert not list(run.output_dir.glob("checkpoints/unfinished_*"))
