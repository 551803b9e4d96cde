"""Translate or summarize texts with an encoder-decoder: a small T5 from scratch, or a pretrained model of transformers.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/translation.py

Data: dates as people write them, and as ISO 8601. Or your own CSV, JSON-lines or parquet file, or a Hub id, with two
columns of texts.
Expect: 100 % of 750 held-out dates written right. Tokens are bytes.
Time: a minute on two CPU cores.

To continue from a pretrained model with your own translations or summaries, and to try the exported model:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/translation.py --data path/to/pairs.csv \\
        --source_column en --target_column de --model_name_or_path path/or/hub-id --learning_rate 5e-5 --measure bleu \\
        --prefix "translate English to German: "
    python recipes/translation.py --predict "4 July 1776"
"""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Literal

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from accelerate_recipes import RunConfig, Schedule, UsageError, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, Examples, ForwardStep, Metrics, pad_to_longest, parts_of
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED
from accelerate_recipes.common.tasks.models.encoder import load_encoder
from accelerate_recipes.common.tasks.models.pretrained import export_of, exported_model
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp.translations import Pairs, Translations, load_translations, make_measure
from accelerate_recipes.common.tasks.reading.mixture import Sources


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "dates"
    epochs: int = 6
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "linear"
    log_every: int = 50
    max_length: int = flag(64, "sources are cut off after this number of tokens", minimum=1)
    max_target_length: int = flag(128, "the same for targets, and the most that the model writes", minimum=1)
    source_column: str = flag("source", "name of the column with the texts; translation.en: en in column translation")
    target_column: str = flag("target", "name of the column with their translations or summaries")
    prefix: str = flag("", "text before each source, such as 'summarize: '")
    source_lang: str | None = flag(None, "language of the sources, for a multilingual tokenizer, such as en_XX")
    target_lang: str | None = flag(None, "language of the targets, for a multilingual tokenizer, such as de_DE")
    forced_first_token: str | None = flag(None, "first token of each text that the model writes, such as a language's")
    label_smoothing: float = flag(0.0, "amount of label smoothing in training, such as 0.1", minimum=0, below=1)
    num_beams: int | None = flag(None, "beams in beam search; default: as in generation_config.json, or 1", minimum=1)
    num_layers: int = flag(2, "layers of the encoder, and of the decoder, from scratch", minimum=1)
    num_heads: int = flag(4, "attention heads", minimum=1)
    hidden_size: int = flag(64, "width of the model", minimum=1)
    dropout: float = flag(0.0, "probability of dropout; its masks depend on --micro_batch_size", minimum=0, below=1)
    model_name_or_path: str | None = flag(None, "continue from this model and its tokenizer (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run the Python code that comes with the model: read it first")
    measure: Literal["exact_match", "bleu", "rouge"] = flag("exact_match", "of the written texts; bleu: with chrF")
    predict: str | None = flag(None, "instead of training, give this text to the model in --output_dir")


def dates() -> Pairs:
    """Days of six centuries as people write them, and as ISO 8601."""
    forms = "{0:%A}, {0:%B} {0.day}, {0.year}", "{0.day} {0:%B} {0.year}", "{0.year}, on the {0.day}. of {0:%b}"
    days = [date(1500, 1, 1) + timedelta(29 * number) for number in range(7_500)]
    return [(forms[number % 3].format(day), day.isoformat()) for number, day in enumerate(days)]


def make_forward_step(config: Config, pad: int) -> ForwardStep:
    """`forward_step` for the flags. `pad`: token that pads written texts to the same length under each config."""

    def forward_step(model: Any, batch: Batch) -> dict[str, Tensor]:
        """The mean loss of each text's tokens. In an evaluation also the text that the model writes."""
        source, labels = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]
        logits = model(**source, decoder_input_ids=batch["decoder_input_ids"], use_cache=False).logits.float()
        smoothing = config.label_smoothing * model.training
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing)
        values = {"loss": losses.sum(1) / batch["weight"]}
        if not model.training:
            tokens = model.generate(**source)[:, 1:]
            values["written"] = F.pad(tokens, (0, config.max_target_length - tokens.shape[1]), value=pad)
        return values

    return forward_step


def build(config: Config) -> tuple[Any, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    if path := config.model_name_or_path:
        trust = {"trust_remote_code": config.trust_remote_code}
        model, tokenizer = load_encoder(AutoModelForSeq2SeqLM, path, config.max_length, **trust)
        for name, language in (("src_lang", config.source_lang), ("tgt_lang", config.target_lang)):
            if language:
                setattr(tokenizer, name, language)
    else:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "</s>"})
        end = tokenizer.eos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", end)]
        )
        shape = T5Config(
            vocab_size=len(tokenizer),
            d_model=config.hidden_size,
            d_kv=max(1, config.hidden_size // config.num_heads),
            d_ff=4 * config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            dropout_rate=config.dropout,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=end,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
        model = T5ForConditionalGeneration(shape)
    written = {"max_new_tokens": config.max_target_length, "max_length": None}
    if config.num_beams:
        written["num_beams"] = config.num_beams
    if config.target_lang and model.generation_config.decoder_start_token_id is None:  # mBART's, for example
        written["decoder_start_token_id"] = tokenizer.convert_tokens_to_ids(config.target_lang)
    if token := config.forced_first_token:
        if (number := tokenizer.get_vocab().get(token)) is None:
            raise UsageError(f"--forced_first_token {token}: the tokenizer has no such token")
        written["forced_bos_token_id"] = number
    model.generation_config.update(**written)  # becomes part of the export
    return model, tokenizer


def predict(config: Config, text: str) -> None:
    """Prints what the exported model writes."""
    model, tokenizer = exported_model(AutoModelForSeq2SeqLM, config.output_dir)
    tokens = tokenizer(config.prefix + text, return_tensors="pt")
    print_once(tokenizer.decode(model.generate(**tokens)[0], skip_special_tokens=True))


def main(config: Config) -> None:
    """Trains the encoder-decoder and exports it with its tokenizer, or lets the exported model write a text."""
    if config.predict is not None:
        return predict(config, config.predict)
    measure = make_measure(config.measure)
    accelerator = start(config)
    model, tokenizer = build(config)
    sources = Sources(config, lambda data: load_translations(data, config.source_column, config.target_column, dates))

    def encoded(pairs: Pairs) -> Translations:
        return Translations(pairs, tokenizer, model, config.prefix, config.max_length, config.max_target_length)

    def measures(examples: Examples) -> Metrics:
        written = tokenizer.batch_decode(examples["written"], skip_special_tokens=True)
        right = [text for part in parts_of(eval_set) for text in part.targets]
        return measure([text.strip() for text in written], right[: len(written)])

    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(encoded)
    pad = tokenizer.pad_token_id
    fit(
        accelerator,
        model,
        optimizer,
        make_forward_step(config, pad),
        train_set,
        eval_set,
        config,
        examples=measures,
        collate_fn=pad_to_longest({"input_ids": pad, "decoder_input_ids": pad, "labels": IGNORED}),
        export=export_of(model, tokenizer),
    )


if __name__ == "__main__":
    run(main, Config)
