"""The peer of recipes/finetune.py: TRL's SFTTrainer, which trains the completion of each row."""

import json
import sys
from pathlib import Path

from shared import (
    BATCH,
    LEARNING_RATE,
    MAX_LENGTH,
    InOrder,
    answer,
    drawn_rows,
    question,
    settings,
    write_model,
    write_rows,
)

PEER = "TRL SFTTrainer"


def prepare(folder: Path, steps: int) -> None:
    """Writes the model and the rows of so many steps."""
    write_model(folder)
    write_rows(folder, [{"prompt": question(row), "completion": answer(row + 1)} for row in range(steps * BATCH)])


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {MAX_LENGTH} "
        f"--learning_rate {LEARNING_RATE} --num_answers 0"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Trainer(InOrder, SFTTrainer):
        pass

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        SFTConfig(**settings(folder, steps), max_length=MAX_LENGTH),
        train_dataset=Dataset.from_list(drawn_rows(folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    print(json.dumps(trainer.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
