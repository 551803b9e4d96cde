"""Tag the words of texts, such as names of persons and places, with an encoder: a small BERT, or a pretrained model.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/token_classification.py

Data: code of Python's standard library; the tags come from Python's own tokenizer: keywords, definitions, numbers,
strings and comments of several words. Or your own CoNLL file, or JSON lines, a parquet file or a Hub id with lists.
Expect: 91 % accuracy and an F1 of 0.66 for entities that Python's tokenizer finds with rules. Tokens are words.
Time: half a minute on two CPU cores.

To train on your own tags, to continue from a pretrained encoder, and to tag a text:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/token_classification.py \\
        --data path/to/tags.conll
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/token_classification.py \\
        --data path/to/tags.jsonl --word_column words --tag_column tags \\
        --model_name_or_path path/or/hub-id --learning_rate 2e-5
    python recipes/token_classification.py --predict "class Reader : # reads"
"""

import io
import keyword
import re
import sysconfig
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, AutoTokenizer, BertForTokenClassification

from accelerate_recipes import Schedule, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, pad_to_longest
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED
from accelerate_recipes.common.tasks.models.encoder import EncoderFlags, load_encoder, small_bert
from accelerate_recipes.common.tasks.models.pretrained import export_of, exported_pipeline
from accelerate_recipes.common.tasks.nlp.tagged_words import EncodedWords, Entities, load_tagged_words
from accelerate_recipes.common.tasks.reading.labelled import Labelled, names_of, with_classes
from accelerate_recipes.common.tasks.reading.mixture import Sources

PACKAGES = ("email", "logging", "unittest")  # which every Python has
TAGGED = ("KEYWORD", "DEFINITION", "NUMBER", "STRING", "COMMENT")
WORDS_PER_TEXT = 32


@dataclass(kw_only=True)
class Config(EncoderFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "stdlib"
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    lr_schedule: Schedule = "linear"
    weight_decay: float = 0.01
    log_every: int = 50
    max_length: int = 128
    word_column: str = flag("tokens", "column with the words; in a CoNLL file its name or number, default: the first")
    tag_column: str = flag("ner_tags", "column with the tags; in a CoNLL file its name or number, default: the last")
    predict: str | None = flag(None, "instead of training, tag this text with the exported model")


def tokens_of_python() -> list[tuple[list[str], list[str]]]:
    """(words, tags) of code in pieces of 32 words. A string or comment is an entity of several words."""
    folder, found = Path(sysconfig.get_path("stdlib")), []
    for path in (file for package in PACKAGES for file in sorted((folder / package).glob("*.py"))):
        words, tags, before = list[str](), list[str](), ""
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            kind = re.sub("FSTRING_.*", "STRING", tokenize.tok_name[token.type])
            if kind == "NAME" and before in ("def", "class"):
                kind = "DEFINITION"
            elif kind == "NAME" and keyword.iskeyword(token.string):
                kind = "KEYWORD"
            before = token.string
            for number, word in enumerate(re.findall(r"\w+|[^\w\s]", token.string)):
                mark = "I" if number and len(words) % WORDS_PER_TEXT else "B"  # a piece begins with a new entity
                words.append(word)
                tags.append(f"{mark}-{kind}" if kind in TAGGED else "O")
        starts = range(0, len(words), WORDS_PER_TEXT)
        found += [(words[at : at + WORDS_PER_TEXT], tags[at : at + WORDS_PER_TEXT]) for at in starts]
    return found


def make_forward_step(entities: Entities) -> Callable[[nn.Module, Batch], dict[str, Tensor]]:
    """`forward_step`: the loss and accuracy of each example, means over its words; to evaluate, also its entities."""

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        labels, number = batch["labels"], batch["weight"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
        predicted = logits.argmax(-1)
        values = {"loss": losses.sum(1) / number, "accuracy": (predicted == labels).sum(1) / number}
        return values if model.training else values | entities.count(predicted, labels)

    return forward_step


def build(config: Config, parts: list[Labelled]) -> tuple[Any, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    classes = parts[0].classes
    if path := config.model_name_or_path:
        options = {"trust_remote_code": config.trust_remote_code}
        read = partial(load_encoder, AutoModelForTokenClassification, path, config.max_length, **options)
        model, tokenizer = with_classes(read, path, classes)
        if (
            getattr(tokenizer, "add_prefix_space", None) is False
        ):  # RoBERTa's, for example: each word would begin without a space
            tokenizer = AutoTokenizer.from_pretrained(path, add_prefix_space=True, **options)
        return model, tokenizer
    texts = (" ".join(words) for part in parts for words in part.samples)
    return small_bert(config, BertForTokenClassification, texts, classes)


def predict(config: Config, text: str) -> None:
    """Prints the entities that the exported model finds in a text."""
    found = exported_pipeline("token-classification", config.output_dir)(text, aggregation_strategy="first")
    print_once("\n".join(f"{one['entity_group']}: {text[one['start'] : one['end']]}" for one in found) or "no entity")


def main(config: Config) -> None:
    """Trains the encoder and exports it with its tokenizer, or tags a text."""
    if config.predict is not None:
        return predict(config, config.predict)
    accelerator = start(config)
    columns = config.word_column, config.tag_column
    sources = Sources(config, lambda data: load_tagged_words(data, *columns, tokens_of_python), same=("classes",))
    model, tokenizer = build(config, [train for train, _ in sources.parts.values()])
    classes = names_of(model.config)  # a pretrained head that has these classes keeps its order
    entities = Entities(classes)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(lambda part: EncodedWords(part.reorder(classes), tokenizer, config.max_length))
    fit(
        accelerator,
        model,
        optimizer,
        make_forward_step(entities),
        train_set,
        eval_set,
        config,
        examples=entities.measures,
        collate_fn=pad_to_longest({"input_ids": tokenizer.pad_token_id, "labels": IGNORED}),
        export=export_of(model, tokenizer),
    )


if __name__ == "__main__":
    run(main, Config)
