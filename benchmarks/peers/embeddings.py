"""The peer of recipes/embeddings.py: sentence-transformers with its MultipleNegativesRankingLoss."""

import json
import sys
from pathlib import Path

import torch
from shared import BATCH, LEARNING_RATE, InOrder, drawn_rows, settings, write_rows
from transformers import BertConfig, BertModel

from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

PEER, MAX_LENGTH, SCALE = "sentence-transformers", 64, 20.0


def prepare(folder: Path, steps: int) -> None:
    """Writes a BERT of 11 million weights with random ones, and the pairs of so many steps."""
    texts = [" ".join(f"word{row * place % 977}" for place in range(5, 20 + row % 40)) for row in range(steps * BATCH)]
    tokenizer = word_tokenizer(texts, 1024)
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    BertModel(shape, add_pooling_layer=False).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder, [{"query": text[: len(text) // 2], "document": text[len(text) // 2 :]} for text in texts])


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {MAX_LENGTH} "
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
    model.max_seq_length = MAX_LENGTH
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
