"""Classify texts with an encoder: a small BERT from scratch, or a pretrained model of transformers.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/text_classification.py

Data: pieces of four lines from Python's standard library; the class is the package. Or your own CSV, JSON-lines or
parquet file, or a Hub id.
Expect: 90 % accuracy and a macro F1 of 0.89 for five packages. Tokens are words.
Time: a minute on two CPU cores.

To train on your own texts, or to continue from a pretrained encoder:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/text_classification.py \\
        --data path/to/texts.csv --text_column review --label_column stars
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/text_classification.py \\
        --data path/to/texts.csv --model_name_or_path path/or/hub-id --learning_rate 2e-5
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from accelerate_recipes import Schedule, fit, flag, parameter_groups, run, start
from accelerate_recipes.common.data import Batch, Examples, Metrics
from accelerate_recipes.common.tasks.encoder import EncoderFlags, load_encoder, pad_texts, small_bert
from accelerate_recipes.common.tasks.known_classes import names_of, with_classes
from accelerate_recipes.common.tasks.labelled import Labelled, balanced_weights
from accelerate_recipes.common.tasks.labelled_texts import EncodedTexts, load_labelled_texts
from accelerate_recipes.common.tasks.mixture import Sources
from accelerate_recipes.common.tasks.pretrained import export_of


@dataclass(kw_only=True)
class Config(EncoderFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "stdlib"
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "linear"
    weight_decay: float = 0.01
    log_every: int = 50
    text_column: str = flag("text", "name of the column with the texts")
    label_column: str = flag("label", "name of the column with the classes")
    balanced: bool = flag(False, "give each class the same weight in the loss, instead of each text")


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss, the predicted class and the class of each example."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    predicted = logits.argmax(-1)
    return {
        # Not as "weight" of the batch: that would weigh the accuracy, too.
        "loss": F.cross_entropy(logits, batch["label"], reduction="none") * batch["class_weight"],
        "accuracy": (predicted == batch["label"]).float(),
        "predicted": predicted,
        "label": batch["label"],
    }


def macro_f1(examples: Examples) -> Metrics:
    """The mean over the classes of F1, the harmonic mean of precision and recall."""
    predicted, label = examples["predicted"], examples["label"]
    classes = torch.cat([label, predicted]).unique()
    hits = torch.stack([((predicted == one) & (label == one)).sum() for one in classes])
    sizes = torch.stack([(predicted == one).sum() + (label == one).sum() for one in classes])
    return {"macro_f1": float((2 * hits / sizes).mean())}


def build(config: Config, parts: list[Labelled]) -> tuple[Any, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    classes = parts[0].classes
    if path := config.model_name_or_path:
        options = {"trust_remote_code": config.trust_remote_code}
        read = partial(load_encoder, AutoModelForSequenceClassification, path, config.max_length, **options)
        return with_classes(read, path, classes)
    texts = (text for part in parts for text in part.samples)
    return small_bert(config, BertForSequenceClassification, texts, classes)


def main(config: Config) -> None:
    """Trains the encoder, and exports its tokenizer with it."""
    accelerator = start(config)
    sources = Sources(
        config,
        lambda data: load_labelled_texts(data, config.text_column, config.label_column),
        same=("classes",),
    )
    parts = [train for train, _ in sources.parts.values()]
    model, tokenizer = build(config, parts)
    classes = names_of(model.config)  # a pretrained head that knows them keeps its order
    parts = [part.reorder(classes) for part in parts]
    weights = balanced_weights(parts) if config.balanced else [1.0] * len(classes)

    def encoded(part: Labelled) -> EncodedTexts:
        return EncodedTexts(part.reorder(classes), tokenizer, config.max_length, weights)

    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(encoded)
    fit(
        accelerator,
        model,
        optimizer,
        forward_step,
        train_set,
        eval_set,
        config,
        examples=macro_f1,
        collate_fn=pad_texts(model, tokenizer),
        export=export_of(model, tokenizer),
    )


if __name__ == "__main__":
    run(main, Config)
