"""Promise: texts are classified well, and the exported model is one of transformers."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.launching import fork
from support.recipes import RECIPES
from support.runs import refused
from support.small_model import write_encoder

SCRIPT, ARGUMENTS = RECIPES["text classification"]


def test_exported_model_classifies(tmp_path: Path) -> None:
    from transformers import pipeline

    rows = [f"{kind} day number {number},{kind}" for number in range(60) for kind in ("good", "bad")]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    write_encoder(tmp_path / "encoder")
    flags = f"--data {tmp_path}/texts.csv --batch_size 16 --max_steps 40 --learning_rate 1e-2 --balanced"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{flags} --model_name_or_path {tmp_path}/encoder --save_predictions")
    assert run.column("eval/accuracy")[-1] == run.column("eval/macro_f1")[-1] == 1
    classifier = pipeline("text-classification", model=str(run.output_dir / "model"))
    assert [one["label"] for one in classifier(["good day number 99", "bad day number 99"])] == ["good", "bad"]
    assert len((run.output_dir / "predictions.jsonl").read_text().splitlines()) == 24


def test_a_head_keeps_the_order_of_its_classes(tmp_path: Path) -> None:
    """A class of the data is the output that has its name, wherever this stands among the outputs."""
    rows = [f"{kind} day {number},{kind}" for number in range(60) for kind in ("bad", "good", "mild")]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    flags = f"--data {tmp_path}/texts.csv --num_layers 1 --hidden_size 32 --batch_size 16 --warmup_steps 0"
    first = fork(tmp_path / "first", "single", SCRIPT, f"{flags} --max_steps 40 --learning_rate 1e-2")
    assert first.column("eval/accuracy")[-1] == 1
    assert f"--data {tmp_path}/texts.csv: 3 classes: bad 60, good 60, mild 60\n" in first.stdout
    model = tmp_path / "first" / "model"
    weights = load_file(model / "model.safetensors")
    turned = {name: value.roll(1, 0) if name.startswith("classifier") else value for name, value in weights.items()}
    save_file(turned, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["id2label"] = {"0": "mild", "1": "bad", "2": "good"}
    config["label2id"] = {"mild": 0, "bad": 1, "good": 2}
    (model / "config.json").write_text(json.dumps(config))
    flags = f"{flags} --model_name_or_path {model} --max_steps 1 --learning_rate 1e-9"
    run = fork(tmp_path / "run", "ddp", SCRIPT, flags)
    assert run.column("eval/accuracy")[-1] == 1
    exported = json.loads((run.output_dir / "model" / "config.json").read_text())
    assert exported["id2label"] == config["id2label"]
    (tmp_path / "texts.csv").write_text((tmp_path / "texts.csv").read_text().replace(",mild", ",so"))
    run = fork(tmp_path / "other", "single", SCRIPT, flags)
    assert "the head is new" in run.stdout and "knows mild, bad, good; the data has bad, good, so" in run.stdout


@pytest.mark.full
def test_accuracy(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", SCRIPT)
    assert run.column("eval/accuracy")[-1] > 0.87 and run.column("eval/macro_f1")[-1] > 0.85


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num_heads 5", "--hidden_size 32 does not divide into 5 heads: use --hidden_size 30"),
        ("--data nowhere.csv", "--data nowhere.csv: no such file"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))


def test_resume_on_other_data(tmp_path: Path) -> None:
    """The same rows go on from another path; the same number of other rows, under the same name, do not."""
    rows = [f"{kind} day number {number},{kind}" for number in range(40) for kind in ("good", "bad")]
    first, moved = tmp_path / "texts.csv", tmp_path / "moved.csv"
    first.write_text("\n".join(["text,label", *rows]))
    moved.write_text(first.read_text())
    flags = "--batch_size 8 --num_layers 1 --vocabulary 64 --check_steps 0 --save_every 2"
    fork(tmp_path / "run", "single", SCRIPT, f"{flags} --data {first} --max_steps 2")
    latest = f"{flags} --resume_from_checkpoint latest"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{latest} --data {moved} --max_steps 4")
    assert "resumed from" in run.stdout and run.checkpoints == [2, 4]
    moved.write_text("\n".join(["text,label", *reversed(rows)]))
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{latest} --data {moved} --max_steps 6", succeeds=False)
    line = refused(run)
    assert "the data differ from the data of the checkpoint" in line and "of sample 0 differs" in line
    assert "use --overwrite_output_dir to start over" in line and run.checkpoints == [2, 4]
