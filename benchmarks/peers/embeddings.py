"""The peer of recipes/embeddings.py: sentence-transformers with its MultipleNegativesRankingLoss."""

import json
import sys
from functools import partial
from pathlib import Path

from shared import BATCH, LEARNING_RATE, LONGEST_TEXT, InOrder, drawn_rows, settings, write_encoder, write_rows
from transformers import BertModel

PEER, SCALE = "sentence-transformers", 20.0


def prepare(folder: Path, steps: int) -> None:
    """Writes a BERT of 11 million weights with random ones, and the pairs of so many steps."""
    texts = write_encoder(folder, steps, partial(BertModel, add_pooling_layer=False))
    write_rows(folder, [{"query": text[: len(text) // 2], "document": text[len(text) // 2 :]} for text in texts])


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {LONGEST_TEXT} "
        f"--learning_rate {LEARNING_RATE} --loss one_direction --no_learn_temperature --temperature {1 / SCALE}"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    class Trainer(InOrder, SentenceTransformerTrainer):
        pass

    model = SentenceTransformer(str(folder / "model"), device="cpu")  # the mean of a model without modules.json
    model.max_seq_length = LONGEST_TEXT
    trainer = Trainer(
        model,
        SentenceTransformerTrainingArguments(**settings(folder, steps)),
        train_dataset=Dataset.from_list(drawn_rows(folder)),
        loss=MultipleNegativesRankingLoss(model, scale=SCALE),
    )
    trainer.train()
    print(json.dumps(trainer.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
