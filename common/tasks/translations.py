"""Texts and what becomes of them, such as translations and summaries: embedded, in a file, or on the Hub."""

from collections.abc import Callable, Iterator
from datetime import date, timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UsageError
from .rows import rows_with_text
from .sources import hold_out, load_tables
from .tokenization import rows_with_tokens

IGNORED = -100  # a label that no loss counts
FIRST_DAY, NUM_DAYS = date(1500, 1, 1), 219_000  # six centuries, of which each 29th day is embedded
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
ONES += "seventeen eighteen nineteen"
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
ORDINALS |= {"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}
HELD_OUT = 10  # one pair in so many is for evaluation, if the source has no evaluation part
ADVICE = "use --data dates for the embedded pairs, or the path of a .csv, .jsonl or .parquet file"

Pairs = list[tuple[str, str]]


def load_translations(data: str, source: str = "source", target: str = "target") -> tuple[Pairs, Pairs]:
    """(training pairs, evaluation pairs) of a text and what becomes of it.

    Args:
        data: "dates" (dates in words, and as ISO 8601); or what `load_tables` takes.
        source, target: names of columns; "translation.de" is what a cell of the column translation has as "de".

    Raises:
        UsageError: no data, no such column, or fewer than two pairs.
    """
    parts: list[Any] = [[*_dates()]] if data == "dates" else []
    for table in [] if parts else load_tables(data, ADVICE):
        table.check_columns({"--source_column": source, "--target_column": target})
        parts.append(rows_with_text(table, source, target))
    if len(parts) == 1 and len(parts[0]) > 1:
        parts = [[parts[0][number] for number in ids.sort().values] for ids in hold_out(len(parts[0]), HELD_OUT)]
    if len(parts) < 2 or not all(parts):
        raise UsageError(f"--data {data} has too few pairs of texts: expected one for training and one for evaluation")
    return parts[0], parts[1]


def _dates() -> Iterator[tuple[str, str]]:
    """Days in words, in two orders, and with digits."""
    for number, days in enumerate(range(0, NUM_DAYS, 29)):
        day = FIRST_DAY + timedelta(days)
        century, rest = divmod(day.year, 100)
        year = f"{_words(century)} {_words(rest) if rest > 9 else f'oh {_words(rest)}' if rest else 'hundred'}"
        head, dash, last = _words(day.day).rpartition("-")
        ordinal = f"{head}{dash}{ORDINALS.get(last, f'{last}th')}"
        form = (
            "the {ordinal} of {day:%B}, {year}",
            "{day:%A}, {day:%B} the {ordinal}, {year}",
            "{day.day} {day:%B} {day.year}",
        )
        yield form[number % 3].format(day=day, ordinal=ordinal, year=year), day.isoformat()


def _words(number: int) -> str:
    """A number below 100."""
    tens, ones = divmod(number, 10)
    if number < 20 or not ones:
        return TENS.split()[tens] if number >= 20 else ONES.split()[number]
    return f"{TENS.split()[tens]}-{ONES.split()[ones]}"


class Translations(Dataset):
    """Samples {"input_ids": int64 of shape (source length,), "decoder_input_ids": int64 of shape (length,), "labels":
    the same, "weight": the number of labels}.

    Args:
        pairs: of texts.
        tokenizer: of transformers.
        model: says which token begins a text to write.
        prefix: text before each source.
        max_length, max_target_length: tokens beyond these numbers are left out.
    """

    def __init__(self, pairs: Pairs, tokenizer: Any, model: Any, prefix: str, max_length: int, max_target_length: int):
        sources = tokenizer([prefix + source for source, _ in pairs], truncation=True, max_length=max_length)
        targets = tokenizer(text_target=[target for _, target in pairs], truncation=True, max_length=max_target_length)
        kept = rows_with_tokens(sources["input_ids"], targets["input_ids"])
        self.samples = []
        for row in kept:
            labels = torch.tensor(targets["input_ids"][row])
            begun = model.prepare_decoder_input_ids_from_labels(labels=labels[None])[0]
            tokens = {
                "input_ids": torch.tensor(sources["input_ids"][row]),
                "decoder_input_ids": begun,
                "labels": labels,
            }
            self.samples.append(tokens | {"weight": float(len(labels))})
        self.targets = [pairs[row][1].strip() for row in kept]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def make_measure(name: str) -> Callable[[list[str], list[str]], dict[str, float]]:
    """A function from written texts and right ones to measures, in percent: sacrebleu's BLEU and chrF, or the F1 of
    rouge-score with stems, besides the share of texts that are equal. Raises UsageError for a missing package."""
    if name == "exact_match":
        return _exact_match
    try:
        if name == "bleu":
            import sacrebleu

            def of_corpus(written: list[str], right: list[str]) -> dict[str, float]:
                bleu, chrf = sacrebleu.corpus_bleu(written, [right]), sacrebleu.corpus_chrf(written, [right])
                return _exact_match(written, right) | {"bleu": bleu.score, "chrf": chrf.score}

            return of_corpus
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        package = {"bleu": "sacrebleu"}.get(name, "rouge-score")
        raise UsageError(f"--measure {name} needs {package}: run pip install {package}") from None
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)

    def rouge(written: list[str], right: list[str]) -> dict[str, float]:
        scores = [scorer.score(wanted, given) for wanted, given in zip(right, written)]
        means = {one: 100 * sum(each[one].fmeasure for each in scores) / len(scores) for one in scores[0]}
        return _exact_match(written, right) | means

    return rouge


def _exact_match(written: list[str], right: list[str]) -> dict[str, float]:
    return {"exact_match": 100 * sum(map(str.__eq__, written, right)) / len(right)}


def write_greedily(logits_of: Callable[[Tensor], Tensor], tokens: Tensor, length: int, settings: Any) -> Tensor:
    """The most probable token, one after another, as from `generate` without beams: int64 of shape (batch, length).

    All processes take `length` passes, because those of a sharded model wait for each other.

    Args:
        logits_of: tokens so far, of shape (batch, tokens) -> logits of the next one, of shape (batch, vocabulary).
        tokens: with which texts begin, of shape (batch, 1).
        length: of the longest text.
        settings: transformers' generation config, with the tokens that end a text, and that fill it up.
    """
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    stops, ended = torch.tensor(ends, device=tokens.device), torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    for place in range(length):
        token = logits_of(tokens).argmax(-1)
        if place == 0 and settings.forced_bos_token_id is not None:
            token = torch.full_like(token, settings.forced_bos_token_id)
        token = token.masked_fill(ended, settings.pad_token_id)
        ended = ended | torch.isin(token, stops)
        tokens = torch.cat([tokens, token[:, None]], 1)
    return tokens[:, 1:]
