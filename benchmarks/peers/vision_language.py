"""The peer of recipes/vision_language.py: TRL's SFTTrainer, which trains the completion of each row, with images."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from shared import BATCH, LEARNING_RATE, MAX_LENGTH, InOrder, drawn_rows, settings, write_rows
from transformers import AutoModelForImageTextToText, AutoProcessor, Idefics3ForConditionalGeneration

PEER, RECIPE = "TRL SFTTrainer", Path(__file__).parents[2] / "recipes" / "vision_language.py"
COLOURS = ("red", "green", "blue", "white")


def prepare(folder: Path, steps: int) -> None:
    """Writes an Idefics3 of 11 million weights with random ones, and the rows of so many steps, with images."""
    torch.manual_seed(0)
    small, processor = runpy.run_path(str(RECIPE))["small_vision_model"](MAX_LENGTH, "sdpa")
    shape = small.config.text_config
    shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers, shape.num_attention_heads = 384, 1536, 5, 6
    shape.num_key_value_heads, shape.head_dim = 6, 64
    Idefics3ForConditionalGeneration(small.config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    (folder / "images").mkdir()
    rows = []
    for number in range(steps * BATCH):
        colour, path = COLOURS[number % 4], folder / "images" / f"{number}.png"
        Image.new("RGB", (64, 48), colour).save(path)
        question = [
            {"type": "image"},
            {"type": "text", "text": f"Which colour has {number}?" + " Look." * (number % 7)},
        ]
        answer = [{"type": "text", "text": f"It is {colour}" + ", as you see" * (number % 5) + "."}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": [str(path)]})
    write_rows(folder, rows)


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {MAX_LENGTH} "
        f"--learning_rate {LEARNING_RATE} --num_answers 0"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from datasets import Dataset, List
    from datasets import Image as ImageFeature
    from trl import SFTConfig, SFTTrainer

    def divide(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["messages"][:1], "completion": row["messages"][1:], "images": row["images"]}

    rows = Dataset.from_list(list(map(divide, drawn_rows(folder)))).cast_column("images", List(ImageFeature()))
    trainer = type("Trainer", (InOrder, SFTTrainer), {})(
        AutoModelForImageTextToText.from_pretrained(folder / "model"),
        args=SFTConfig(**settings(folder, steps), max_length=None),
        train_dataset=rows,
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
    )
    trainer.train()
    print(json.dumps(trainer.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
