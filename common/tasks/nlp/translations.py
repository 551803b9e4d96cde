"""Pairs of source and target text, such as translations and summaries, from files or the Hub."""

from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional as F

from ...data.sets import ListDataset
from ...errors import UsageError
from ..models.tokenization import rows_with_tokens
from ..reading.rows import rows_with_text
from ..reading.sources import divide, load_tables

ROUGES = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
ADVICE = "use --data dates for the embedded pairs, or the path of a .csv, .jsonl or .parquet file"

Pairs = list[tuple[str, str]]


class Translations(ListDataset):
    """Samples {"input_ids": int64 of shape (source length,), "decoder_input_ids" and "labels": int64 of shape (target
    length,), "weight": the number of labels}.

    Args:
        pairs: of texts.
        tokenizer: of transformers.
        model: its config tells which token begins a text to write.
        prefix: text before each source.
        max_length, max_target_length: tokens beyond these numbers are left out.
    """

    def __init__(self, pairs: Pairs, tokenizer: Any, model: Any, prefix: str, max_length: int, max_target_length: int):
        most, flag = getattr(model.config, "max_position_embeddings", None), "--max_target_length"
        if most and 0 < most < max_target_length:
            raise UsageError(f"{flag} {max_target_length} exceeds the model's {most} positions: use {flag} {most}")
        for side, name, word in (("source", "src_lang", "text"), ("target", "tgt_lang", "text_target")):
            if language := getattr(tokenizer, name, None):
                if not hasattr(type(tokenizer), "src_lang") and name not in tokenizer.init_kwargs:  # a flag has set it
                    raise UsageError(f"--{side}_lang {language}: the tokenizer has no languages: remove it")
                with suppress(KeyError):
                    if tokenizer.unk_token_id not in tokenizer(**{word: ""})["input_ids"]:
                        continue
                known = sorted(token.strip("_") for token in tokenizer.get_added_vocab() if "<" not in token)[:4]
                what = f"is unknown to the tokenizer: use one of {', '.join(known)}, ..."
                raise UsageError(f"--{side}_lang {language} {what}")
        sources = tokenizer([prefix + source for source, _ in pairs], truncation=True, max_length=max_length)
        targets = tokenizer(text_target=[target for _, target in pairs], truncation=True, max_length=max_target_length)
        kept = rows_with_tokens(sources, targets)
        self.targets, self.samples = [pairs[row][1].strip() for row in kept], []
        num_rows = model.get_input_embeddings().num_embeddings
        for row in kept:
            source, labels = (torch.tensor(each["input_ids"][row]) for each in (sources, targets))
            try:
                if hasattr(model, "prepare_decoder_input_ids_from_labels"):
                    begun = model.prepare_decoder_input_ids_from_labels(labels=labels[None])[0]
                else:  # M2M100 and NLLB, for example
                    begun = F.pad(labels[:-1], (1, 0), value=model.config.decoder_start_token_id)
                if not 0 <= begun[0] < num_rows:
                    raise ValueError
            except (ValueError, TypeError):
                first = f"decoder_start_token_id {model.config.decoder_start_token_id}"
                raise UsageError(f"the model's config.json has {first}: expected a token that it knows") from None
            sample = {"input_ids": source, "decoder_input_ids": begun, "labels": labels, "weight": float(len(labels))}
            self.samples.append(sample)


def load_translations(data: str, source: str, target: str, embedded: Callable[[], Pairs]) -> tuple[Pairs, Pairs]:
    """(training pairs, evaluation pairs) of a text and its translation or summary. If the source has only one part, one
    pair in ten is held out. Raises UsageError for data that it cannot use.

    Args:
        data: "dates", for what `embedded` gives; or what `load_tables` takes.
        source, target: names of columns; "translation.de" is what a cell of the column translation has as "de".
    """
    parts: list[Any] = [embedded()] if data == "dates" else []
    for table in [] if parts else load_tables(data, ADVICE, None, lambda table: table.has_classes(target)):
        table.check_columns({"--source_column": source, "--target_column": target})
        parts.append(rows_with_text(table, source, target))
    if not all(parts := divide(parts)):
        raise UsageError(f"--data {data} has too few pairs of texts: expected enough to train and to evaluate")
    return parts[0], parts[1]


def make_measure(name: str) -> Callable[[list[str], list[str]], dict[str, float]]:
    """A function of written and right texts. It returns the share that is equal; with "bleu" also sacrebleu's BLEU and
    chrF, with "rouge" rouge-score's F1 with stems; all in percent. Raises UsageError for a missing package."""
    try:
        if name == "bleu":
            from sacrebleu import corpus_bleu, corpus_chrf
        elif name == "rouge":
            from rouge_score import rouge_scorer
    except ImportError as error:
        line = f"--measure {name} needs {error.name}: run pip install 'accelerate-recipes[translation]'"
        raise UsageError(line) from None

    def measure(written: list[str], right: list[str]) -> dict[str, float]:
        found = {"exact_match": 100 * fmean(map(str.__eq__, written, right))}
        if name == "bleu":
            found |= {"bleu": corpus_bleu(written, [right]).score, "chrf": corpus_chrf(written, [right]).score}
        elif name == "rouge":
            scorer = rouge_scorer.RougeScorer(ROUGES, use_stemmer=True)
            scores = [scorer.score(*each) for each in zip(right, written)]
            found |= {kind: 100 * fmean(each[kind].fmeasure for each in scores) for kind in ROUGES}
        return found

    return measure
