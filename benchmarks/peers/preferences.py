"""The peer of recipes/preferences.py: TRL's DPOTrainer, with the model before training as its reference."""

import sys
from pathlib import Path

from shared import BATCH, MAX_LENGTH, answer, flags_of_chats, question, settings, train_chats, write_model, write_rows

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
    return f"{flags_of_chats(folder)} --beta {BETA}"


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**settings(folder, steps), max_length=MAX_LENGTH, beta=BETA)
    train_chats(DPOTrainer, config, folder, num_models=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
