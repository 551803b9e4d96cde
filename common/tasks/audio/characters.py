"""Tokens for CTC, and the word and character error rates of what models write."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Wav2Vec2CTCTokenizer

from ...data.facts import say
from ...data.sets import Examples, Metrics
from ...errors import UsageError

SPECIAL = ["[PAD]", "[UNK]", "|"]  # the first is the blank of CTC, the last one a space


def tokenizer_of_texts(name_or_path: str | None, texts: list[str]) -> tuple[Any, bool]:
    """(a model's tokenizer if it knows all characters of these texts, or a new one for them; whether it is new)."""
    known, characters = None, sorted({*"".join(texts)} - {" ", "|"})
    if name_or_path is not None:
        with suppress(Exception):  # a model that was only pretrained has none
            known = AutoTokenizer.from_pretrained(name_or_path)
        lacks = [one for one in characters if known is None or known.unk_token_id in known(one).input_ids]
        if known is not None and not lacks:
            return known, False
        facts = f"{''.join(lacks)[:40]!r} (--letters and --ignored_characters change texts)"
        say(f"the head is new: {name_or_path} has no tokens for {facts}")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.json"
        tokens = {token: number for number, token in enumerate(SPECIAL + characters)}
        file.write_text(json.dumps(tokens), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(str(file), None, None, "[UNK]", "[PAD]", "|"), True


class ErrorRates:
    """Word and character error rates, by jiwer. `is_ctc`: repeated tokens count once, and `blank` never."""

    def __init__(self, tokenizer: Any, is_ctc: bool = True):
        try:
            from jiwer import cer, wer
        except ImportError:
            raise UsageError("error rates need jiwer: run pip install 'accelerate-recipes[speech]'") from None
        self.blank, self.wer, self.cer = tokenizer.pad_token_id, wer, cer
        self.decode = tokenizer.decode if is_ctc else partial(tokenizer.decode, skip_special_tokens=True)
        self.options = {"group_tokens": False} if is_ctc else {}  # for labels

    def count(self, best: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """For `forward_step`: wrong words, words, wrong characters and characters of each text, int64 of shape (batch,
        4); of the best tokens: (batch, frames), how many of them count: (batch,), and the labels: (batch, tokens)."""
        rows = list[tuple[float, ...]]()
        for tokens, number, label in zip(best.tolist(), lengths.tolist(), labels.tolist()):
            right = self.decode([token for token in label if token >= 0], **self.options)
            written, words = self.decode(tokens[:number]), len(right.split())
            rows.append((self.wer(right, written) * words, words, self.cer(right, written) * len(right), len(right)))
        return torch.tensor(rows, device=best.device).round().long()

    def rates(self, examples: Examples) -> Metrics:
        """For `examples` of `fit`: the error rates of all texts together."""
        wrong_words, words, wrong_characters, characters = examples["errors"].sum(0).tolist()
        return {"wer": wrong_words / words, "cer": wrong_characters / characters}
