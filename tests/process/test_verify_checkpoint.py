"""Promise: `accelerate-recipes verify --checkpoint` says whether a run still gives the result of one process, and lets
the run go on."""

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from accelerate_recipes.verify.runs import Launch
from support.launching import ACCELERATE_LAUNCH, CONFIGS, environment, execute, fork
from support.recipes import LINEAR
from support.runs import ROOT, Run
from support.tool import tool

DRIFTS = ROOT / "tests" / "scripts" / "drifts.py"


@pytest.fixture(autouse=True)
def on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """{file or folder: when it changed, and its content}"""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


def drifting(folder: Path, *flags: str) -> Run:
    """A run that a command of a user starts in this folder."""
    (folder / "ours.yaml").write_text((CONFIGS / "ddp.yaml").read_text())
    flags = ("--output_dir", "run", "--divides", "--seed", "3", *flags)
    command = [*ACCELERATE_LAUNCH, "--config_file", "ours.yaml", "--main_process_port", "0", str(DRIFTS), *flags]
    run = execute(command, folder, folder / "run")
    (folder / "ours.yaml").unlink()
    return run


@pytest.mark.full
def test_a_fault_after_the_first_steps_ends_a_rehearsal(tmp_path: Path) -> None:
    run = drifting(tmp_path)
    assert run.card["checked_steps"] == 2
    assert run.exit_code and "DDP does not give the result of one process: in step 9, " in run.stderr


def test_a_fault_after_the_first_steps_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Config and flags are those of the checkpoint."""
    run = drifting(tmp_path, "--check_steps", "0")
    assert run.exit_code == 0 and run.checkpoints[-1] == 9  # in silence
    before = state_of(tmp_path / "run")
    assert tool(monkeypatch, "verify", str(DRIFTS), "--checkpoint", "run/checkpoints/step_00000006") == 1
    assert state_of(tmp_path / "run") == before
    output = capfd.readouterr().out
    assert "ours  DIFFERS: DDP does not give the result of one process: in step 7, " in output
    assert "\n  likely cause: the recipe asks for num_processes (drifts.py:" in output


@pytest.mark.full
def test_a_checkpoint_before_the_fault_is_the_same_under_another_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drifting(tmp_path, "--check_steps", "0")
    capfd.readouterr()
    flags = ["--checkpoint", "run/checkpoints/step_00000002", "--config", "fsdp2", "--json"]
    with FileLock(tmp_path / "run" / ".lock"):  # as if the run went on
        before = state_of(tmp_path / "run")
        assert tool(monkeypatch, "verify", str(DRIFTS), *flags) == 0
        assert state_of(tmp_path / "run") == before
    found = json.loads(capfd.readouterr().out)
    verdict = "same in steps 3 and 4 (FSDP2, 2 processes)"
    assert found["step"] == 2 and found["rows"] == [{"config": "fsdp2", "is_same": True, "verdict": verdict}]


def test_what_is_no_checkpoint_of_this_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fork(tmp_path / "run", "single", DRIFTS, "--max_steps 4")
    monkeypatch.setattr(Launch, "run_until", lambda launch, _, *how: launch.run(*how))  # in forks: none is killed
    last = "run/checkpoints/step_00000004"
    shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    (tmp_path / "damaged" / "checkpoints" / "step_00000004" / "manifest.json").write_text("{}")

    def line(checkpoint: str, *flags: str, recipe: Path = DRIFTS) -> str:
        assert tool(monkeypatch, "verify", str(recipe), "--checkpoint", checkpoint, *flags) == 2
        *others, found, _ = capfd.readouterr().err.split("\n")
        assert not others
        return found

    assert line("run/step_9") == f"--checkpoint run/step_9: no such folder; use {tmp_path / last}"
    assert f"complete checkpoint (manifest.json cannot be read): use {last}" in line("run")
    assert "use damaged" in line("damaged/checkpoints/step_00000004").replace(f"{tmp_path}/", "")
    assert "drifts.yaml: no such config" in line(last, "--config", "drifts.yaml")
    assert line(last, "--config", "single") == "single is one process itself: use another --config, such as ddp"
    assert "--checkpoint takes --config, --json and flags" in line(last, "--steps", "8")
    assert f"{last} is at the end of its run, step 4: use an earlier checkpoint" in line(last, "--config", "ddp")
    assert f"{last} is from drifts.py" in line(last, "--config", "ddp", recipe=ROOT / LINEAR)
