"""The peer of recipes/finetune.py: TRL's SFTTrainer, which trains the completion of each row."""

import sys
from pathlib import Path

from shared import BATCH, MAX_LENGTH, answer, flags_of_chats, question, settings, train_chats, write_model, write_rows

PEER, flags = "TRL SFTTrainer", flags_of_chats


def prepare(folder: Path, steps: int) -> None:
    """Writes the model and the rows of so many steps."""
    write_model(folder)
    write_rows(folder, [{"prompt": question(row), "completion": answer(row + 1)} for row in range(steps * BATCH)])


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from trl import SFTConfig, SFTTrainer

    train_chats(SFTTrainer, SFTConfig(**settings(folder, steps), max_length=MAX_LENGTH), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
