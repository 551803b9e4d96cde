"""The peer of recipes/preferences.py: TRL's DPOTrainer, with the model before training as its reference."""

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

PEER, BETA = "TRL DPOTrainer", 0.1


def prepare(folder: Path, steps: int) -> None:
    """Writes the model and the pairs of so many steps."""
    write_model(folder)
    rows = range(steps * BATCH)
    write_rows(
        folder, [{"prompt": question(row), "chosen": answer(row + 1), "rejected": answer(row + 2)} for row in rows]
    )


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {MAX_LENGTH} "
        f"--learning_rate {LEARNING_RATE} --num_answers 0 --beta {BETA}"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class Trainer(InOrder, DPOTrainer):
        pass

    model, reference = (AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(2))
    trainer = Trainer(
        model,
        reference,
        DPOConfig(**settings(folder, steps), max_length=MAX_LENGTH, beta=BETA),
        train_dataset=Dataset.from_list(drawn_rows(folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    print(json.dumps(trainer.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
