"""Learn embeddings of texts from pairs by contrast: a small BERT from scratch, or a pretrained encoder of transformers.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/embeddings.py

Data: functions of Python's standard library; a docstring belongs to the code of its function. Or your own CSV,
JSON-lines or parquet file, or a Hub id, with two columns of texts, and perhaps wrong documents, or a score of a pair.
Expect: of 263 held-out docstrings, 43 % have their function as the nearest text, and 71 % among the ten nearest.
Time: a minute and a half on two CPU cores.

To train on your own pairs, or to continue from a pretrained encoder with its pooling and prompts:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/embeddings.py \\
        --data path/to/pairs.csv --query_column question --document_column answer
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/embeddings.py \\
        --data path/to/pairs.csv --model_name_or_path path/or/hub-id --learning_rate 2e-5
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModel, BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, run, start
from accelerate_recipes.common.data import Batch, pad_to_longest
from accelerate_recipes.common.tasks.encoder import (
    PADDING,
    Embedder,
    always_mask,
    freeze_key_biases,
    load_encoder,
    load_exported_tokenizer,
    with_tokens,
    word_tokenizer,
)
from accelerate_recipes.common.tasks.lora import LoraFlags, base_of, with_adapters
from accelerate_recipes.common.tasks.mixture import Sources
from accelerate_recipes.common.tasks.pairs import EncodedPairs, Pair, load_pairs, text_names
from accelerate_recipes.common.tasks.pooling import read_pooling
from accelerate_recipes.common.tasks.pretrained import export_of
from accelerate_recipes.common.tasks.similarity import correlations, make_batch_loss, retrieval


@dataclass(kw_only=True)
class Config(LoraFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "stdlib"
    epochs: int = 5
    batch_size: int = flag(64, "pairs per step: each text has to find its partner among theirs", minimum=2)
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    lr_schedule: Schedule = "linear"
    weight_decay: float = 0.01
    log_every: int = 20
    query_column: str = flag("query", "name of the column with the first text of each pair")
    document_column: str = flag("document", "name of the column with the second text of each pair")
    negative_column: str | None = flag(None, "columns of wrong documents, with commas; else negative, negative_1, ...")
    score_column: str | None = flag(None, "name of the column that says how much the two texts are alike")
    query_prompt: str | None = flag(None, "text before each query; else the model's own, if it has one")
    document_prompt: str | None = flag(None, "text before each document; else the model's own, if it has one")
    max_length: int = flag(64, "tokens of a text beyond this number are left out", minimum=1)
    loss: Literal["symmetric", "one_direction", "cosine", "cosent"] = flag(
        "symmetric", "find the partner of each text; of each query alone; for scores: their squared error; their order"
    )
    temperature: float = flag(0.05, "similarities are divided by this in the loss; learned from there", above=0)
    learn_temperature: bool = flag(True, "else it stays; with --score_column it always does")
    matryoshka: str = flag("", "sum the losses of the first so many numbers of each vector, such as 64,32,16")
    pooling: Literal["auto", "mean", "cls", "lasttoken"] = flag("auto", "auto: as the model's modules.json, else mean")
    vocabulary: int = flag(4096, "number of words that the model from scratch knows", minimum=4)
    num_layers: int = flag(2, "encoder layers", minimum=1)
    num_heads: int = flag(4, "attention heads", minimum=1)
    hidden_size: int = flag(64, "width of the model, and of the vectors", minimum=1)
    dropout: float = flag(0.0, "probability of dropout; its masks depend on --micro_batch_size", minimum=0, below=1)
    model_name_or_path: str | None = flag(None, "continue from this encoder and its tokenizer (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run Python code that the model brings: read it first")


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What `batch_loss` needs of each pair."""
    texts = [batch[name] for name in batch if name.startswith(("query", "document", "negative"))]
    query, document, *negatives, scale = model(*texts)
    values = {"query": query, "document": document, "scale": scale}
    if negatives:
        values["negative"] = torch.stack(negatives, 1)
    return values | {name: batch[name] for name in ("text_ids", "score") if name in batch}


def build(config: Config, pooling: str, pairs: list[Pair]) -> tuple[Embedder, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    if (path := base_of(config)) is not None:
        trust = {"trust_remote_code": config.trust_remote_code}
        encoder, tokenizer = load_encoder(AutoModel, path, config.max_length, **trust)
        encoder = with_adapters(encoder, config)
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler.requires_grad_(False)  # no vector uses it
        return Embedder(encoder, tokenizer.pad_token_id, config.temperature, pooling), tokenizer
    if config.hidden_size % config.num_heads:
        raise UsageError(
            f"--hidden_size {config.hidden_size} does not divide into {config.num_heads} heads: use "
            f"--hidden_size {max(1, config.hidden_size // config.num_heads) * config.num_heads}"
        )
    shape = BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_length,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        architectures=["BertModel"],
    )
    encoder = BertModel(shape, add_pooling_layer=False)
    freeze_key_biases(encoder)
    # It shifts all vectors alike, so its gradient nearly cancels, and Adam would make steps of the rounding.
    encoder.encoder.layer[-1].output.LayerNorm.bias.requires_grad_(False)
    always_mask(encoder)
    texts = [text for pair in pairs for text in pair.texts]
    folder = config.output_dir / "model"
    tokenizer = load_exported_tokenizer(folder) if config.evaluate_only else word_tokenizer(texts, config.vocabulary)
    return Embedder(encoder, tokenizer.pad_token_id, config.temperature, pooling), tokenizer


def main(config: Config) -> None:
    """Trains the encoder, and exports its tokenizer with it."""
    disable_progress_bar()
    accelerator = start(config)
    columns = config.query_column, config.document_column, config.negative_column, config.score_column
    sources = Sources(config, lambda data: load_pairs(data, *columns))
    parts = [part for both in sources.parts.values() for part in both]
    prompts = {"query": config.query_prompt, "document": config.document_prompt}
    pooling = read_pooling(config.model_name_or_path, config.pooling, prompts, bool(config.score_column))
    model, tokenizer = build(config, pooling.mode, [pair for train, _ in sources.parts.values() for pair in train])
    model.log_scale.requires_grad_(config.learn_temperature and not config.score_column)
    scores = [pair.score for part in parts for pair in part]
    batch_loss = make_batch_loss(config.loss, config.matryoshka, model.config.hidden_size, scores)

    def encoded(pairs: list[Pair]) -> Dataset:
        return with_tokens(EncodedPairs(pairs, tokenizer, config.max_length, pooling.prompts))

    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(encoded, encoded)
    fit(
        accelerator,
        model,
        optimizer,
        forward_step,
        train_set,
        eval_set,
        config,
        examples=correlations if config.score_column else retrieval,
        collate_fn=pad_to_longest(dict.fromkeys(text_names(parts), PADDING), mask=None),
        export=export_of(model, tokenizer, pooling.files(model.config.hidden_size, config.max_length)),
        batch_loss=batch_loss,
    )


if __name__ == "__main__":
    run(main, Config)
