"""Promise: `accelerate-recipes export` makes of a checkpoint the model that its run exports, bit for bit."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate_recipes.cli import main
from support.launching import execute, fork
from support.recipes import FINETUNE, MNIST, TRANSFORMER
from support.runs import ROOT, Run
from support.small_model import write_model

SHORT = "--max_steps 4 --save_every 2 --log_every 2"
SIZES = "--context 16 --batch_size 8 --num_layers 2 --hidden_size 32 --num_heads 2 --sample_tokens 0"
TIED = f"{SHORT} --data {ROOT / 'LICENSE'} {SIZES}"
LORA = f"{SHORT} --max_length 96 --batch_size 8 --num_answers 0 --lora_rank 4"


def export(checkpoint: Path, folder: Path, *flags: str) -> Run:
    command = [sys.executable, "-m", "accelerate_recipes", "export", str(checkpoint), str(folder), *flags]
    return execute(command, ROOT, folder)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """tool(checkpoint, folder, flags) -> the same without a process, whose imports take seconds."""

    def export(checkpoint: Path, folder: Path, *flags: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["accelerate-recipes", "export", str(checkpoint), str(folder), *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        return Run(int(ended.value.code or 0), *capsys.readouterr(), folder)

    return export


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FULL = ["ddp", "tensor_parallel", "deepspeed_zero2", "deepspeed_zero3"]


@pytest.mark.parametrize(
    ("config", "recipe", "flags"),
    [
        ("fsdp2", MNIST, f"{SHORT} --ema_decay 0.5"),
        *(pytest.param(config, TRANSFORMER, TIED, marks=pytest.mark.full) for config in FULL),
        pytest.param("pipeline_parallel", TRANSFORMER, f"{TIED} --pipeline_stages 2", marks=pytest.mark.full),
        pytest.param("ddp", MNIST, f"{SHORT} --async_save --export_dtype bfloat16", marks=pytest.mark.full),
        pytest.param("fsdp2", FINETUNE, f"{LORA} --model_name_or_path BASE", marks=pytest.mark.full),
    ],
)
def test_model_of_a_checkpoint(tmp_path: Path, config: str, recipe: str, flags: str) -> None:
    if "BASE" in flags:
        write_model(tmp_path / "base", num_positions=96)
    run = fork(tmp_path / "run", config, recipe, flags.replace("BASE", str(tmp_path / "base")))
    assert export(run.output_dir, tmp_path / "last").exit_code == 0
    assert contents(tmp_path / "last") == contents(run.output_dir / "model")
    made = export(run.output_dir / "checkpoints" / "step_00000002", tmp_path / "earlier", "--json")
    assert json.loads(made.stdout)["step"] == 2
    earlier, last = contents(tmp_path / "earlier"), contents(tmp_path / "last")
    assert earlier.keys() == last.keys()
    assert all((earlier[name] == last[name]) == (not name.endswith(".safetensors")) for name in last)


def test_type_and_mistakes(tmp_path: Path, tool: Callable[..., Run]) -> None:
    run = fork(tmp_path / "run", "single", TRANSFORMER, TIED)
    assert tool(run.output_dir, tmp_path / "half", "--dtype", "float16").exit_code == 0
    assert {weight.dtype for weight in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"

    checkpoint = run.output_dir / "checkpoints" / "step_00000004"
    shard = checkpoint / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    for path, folder, line in (
        (tmp_path / "none", "new", "is not a folder: use the folder of a checkpoint or of a run"),
        (run.output_dir, "half", "is not empty: use the name of a new folder"),
        (checkpoint, "new", "is not a complete checkpoint (shard_00000.safetensors has "),
    ):
        refused = tool(path, tmp_path / folder)
        assert refused.exit_code == 2 and line in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
    assert not (tmp_path / "new").exists()
    made = tool(run.output_dir, tmp_path / "new", "--json")
    assert json.loads(made.stdout)["step"] == 2 and f"{checkpoint} is not a complete checkpoint" in made.stderr
    (checkpoint.parent / "model_files" / "config.json").write_text('{"model_type')
    refused = tool(run.output_dir, tmp_path / "damaged")
    assert refused.exit_code == 2 and "config.json is damaged (Unterminated string" in refused.stderr
    assert not (tmp_path / "damaged").exists()
