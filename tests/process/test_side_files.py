"""Promise: what an export needs is tried before the first step; if a file beside the weights cannot be written at the
end, the weights are there, and `accelerate-recipes export` makes a whole model of them."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accelerate_recipes.cli import main
from support.launching import fork
from support.runs import refused

SCRIPT = "tests/scripts/side_files.py"
FILES = ["labels.txt", "model.safetensors", "words.txt"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def made(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelerate-recipes", "export", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_run_without_a_fault_leaves_nothing_else(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", SCRIPT)
    assert names(run.output_dir / "model") == FILES and not (run.output_dir / "checkpoints").exists()


def test_export_that_fails_at_once_is_refused(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", SCRIPT, "--fails 0", succeeds=False)
    line = "error: the model could not be exported after the last step (ValueError: the words are gone (side_files.py:"
    assert line in run.stderr and "fix this first" in run.stderr and run.card["exit_code"] == 2
    assert not (run.output_dir / "metrics.jsonl").exists() and not [*run.output_dir.glob("tmp*")]


def test_export_that_reads_divided_weights_is_refused(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "fsdp2", SCRIPT, "--reads", succeeds=False)
    assert "export reads weight, and FSDP2 divides weights: read " in refused(run)
    ddp = fork(tmp_path / "ddp", "ddp", SCRIPT, "--reads")
    assert (ddp.output_dir / "model" / "words.txt").read_text() == f"{float(ddp.weights['weight'].norm()):.4f}"


def test_weights_without_room_are_refused(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", SCRIPT, f"--width {10**9}", succeeds=False)
    assert (
        run.exit_code == 2 and "the exported model takes 4,000,000.000 GB: use a folder on a larger disk" in run.stderr
    )


@pytest.mark.parametrize("config", ["single", "ddp"])
def test_export_that_fails_at_the_end_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    run = fork(tmp_path / "run", config, SCRIPT, "--fails 2", succeeds=False)
    whole = fork(tmp_path / "whole", config, SCRIPT)
    assert names(run.output_dir / "model") == ["labels.txt", "model.safetensors"] and run.card["exit_code"] == 1
    assert "run/model has the weights, but lacks words.txt (ValueError: the words are gone" in run.stderr
    checkpoint = run.output_dir / "checkpoints" / "step_00000004"
    assert f"accelerate-recipes export {checkpoint} NEW_FOLDER writes the model" in run.stderr
    assert made(monkeypatch, str(checkpoint), str(tmp_path / "new")) == 0
    found, expected = ({path.name: path.read_bytes() for path in folder.iterdir()}
                       for folder in (tmp_path / "new", whole.output_dir / "model"))  # fmt: skip
    assert found == expected


def test_best_model_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    flags = "--fails 2 --eval_every 2 --metric_for_best_model loss --save_every 4"
    run = fork(tmp_path / "run", "ddp", SCRIPT, flags, succeeds=False)
    assert run.stdout.count("best has the weights, but lacks words.txt") == 2 and run.checkpoints == [4]
    assert load_file(run.output_dir / "best" / "model.safetensors").keys() == {"weight", "bias"}
