"""Promise: the model card says what the run card and the records say."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from accelerate_recipes.push.card import write_model_card

CARD = {
    "command": "recipes/cats.py --data me/cats",
    "config": {"data": "me/cats", "batch_size": 32, "ema_decay": 0.9, "seed": None, "compile": True},
    "parallelism": "DDP",
    "num_processes": 8,
    "precision": "bf16",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_steps": 30,
    "wall_seconds": 5.5,
    "hardware": {"cpu": "x86_64", "cores": 4, "gpus": ["H100", "H100"]},
    "versions": {"torch": "2.11"},
    "git_commit": None,
}
RECORDS = [
    {"step": 10, "train/loss": 3.0},
    {"step": 10, "eval/accuracy": 0.5, "eval/perplexity": None},
    {"step": 20, "eval/accuracy": 0.9, "eval/perplexity": 7.0},
    {"step": 30, "eval/accuracy": 0.75, "eval/perplexity": 8.5},
]


def written(output_dir: Path, config_json: dict[str, Any] | None = None) -> ModelCard:
    (output_dir / "model").mkdir()
    (output_dir / "run.json").write_text(json.dumps(CARD))
    (output_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    if config_json is not None:
        (output_dir / "model" / "config.json").write_text(json.dumps(config_json))
    write_model_card(output_dir, CARD, "me/model")
    return ModelCard.load(output_dir / "model" / "README.md")


def test_card(tmp_path: Path) -> None:
    card = written(tmp_path, {"network": "cnn"})
    assert card.data.to_dict() == {
        "library_name": "pytorch",
        "tags": ["accelerate", "safetensors"],
        "datasets": ["me/cats"],
        "metrics": ["accuracy", "perplexity"],
    }
    for line in (
        "# model",
        "| accuracy | 0.75 (step 30) | 0.9 (step 20) |",
        "| perplexity | 8.5 (step 30) | 7 (step 20) |",
        "On the evaluation data. The weights are those of the last step, a moving average of the steps before.",
        "recipes/cats.py --data me/cats",  # the run card of an earlier version has no launch_command
        "| batch | 32 samples, 2 at a time in each process, 2 times before a step |",
        "| hardware | x86_64, 4 cores, H100, H100 |",
        "| git commit | unknown |",
    ):
        assert line in card.text.splitlines()
    flags = card.text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(flags) == {"data": "me/cats", "batch_size": 32, "ema_decay": 0.9, "compile": True}


@pytest.mark.parametrize(
    ("architecture", "task", "usage"),
    [
        ("LlamaForCausalLM", "text-generation", 'generator = pipeline("text-generation", model="me/model")'),
        ("BertForMaskedLM", None, 'model = BertForMaskedLM.from_pretrained("me/model")'),
    ],
)
def test_card_of_a_model_of_transformers(tmp_path: Path, architecture: str, task: str | None, usage: str) -> None:
    card = written(tmp_path, {"architectures": [architecture]})
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", task)
    assert usage in card.text.splitlines()
