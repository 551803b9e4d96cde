"""The peer of recipes/text_classification.py: transformers' Trainer with the same encoder and tokenizer."""

import json
import sys
from pathlib import Path

from shared import BATCH, LEARNING_RATE, LONGEST_TEXT, InOrder, drawn_rows, settings, write_encoder, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

PEER, CLASSES = "transformers' Trainer", ("a", "b", "c")


def prepare(folder: Path, steps: int) -> None:
    """Writes a BERT of 11 million weights with random ones, and the texts of so many steps."""
    texts = write_encoder(folder, steps, BertForSequenceClassification, id2label=dict(enumerate(CLASSES)))
    write_rows(folder, [{"text": text, "label": CLASSES[row % 3]} for row, text in enumerate(texts)])


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {LONGEST_TEXT} "
        f"--learning_rate {LEARNING_RATE}"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def encode(rows: dict[str, list[str]]) -> dict[str, list]:
        encoded = tokenizer(rows["text"], truncation=True, max_length=LONGEST_TEXT)
        return {**encoded, "labels": [CLASSES.index(label) for label in rows["label"]]}

    trainer = type("InOrderTrainer", (InOrder, Trainer), {})(
        AutoModelForSequenceClassification.from_pretrained(folder / "model"),
        TrainingArguments(**settings(folder, steps)),
        train_dataset=Dataset.from_list(drawn_rows(folder)).map(encode, batched=True, remove_columns="label"),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    print(json.dumps(trainer.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
