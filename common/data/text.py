"""Text as blocks of tokens: embedded, in files, or on the Hub."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from common.data.batches import Batch, InMemoryDataset
from common.data.sources import load_splits
from common.errors import UsageError

STDLIB_CHARACTERS = 1_000_000  # enough for a minute of training, and quick to evaluate
IGNORED = -100  # label of padding; torch's cross-entropy ignores it by default


class TokenDataset(InMemoryDataset):
    """A text cut into blocks. Each token but the first is a label in exactly one sample.

    Samples are {"tokens": int64 of shape (context,), "labels": int64 of shape (context,), "weight":
    float32, 0-dim}. Each label is the next token. The end of the last block is padding with the label
    `IGNORED`. The weight is the number of labels without padding.

    Args:
        tokens: int, shape (n,), at least 2.
        context: tokens per block.
        drop_last: leave out a last block that is not full, as training does. All samples then have the
            same number of labels, and no "weight".
    """

    def __init__(self, tokens: Tensor, context: int, drop_last: bool):
        self.context, self.drop_last = context, drop_last
        num_targets = len(tokens) - 1
        self._num_blocks = num_targets // context if drop_last else -(-num_targets // context)
        padding = max(0, self._num_blocks * context - num_targets)
        self.tokens = torch.cat([tokens, tokens.new_zeros(padding)])
        self.num_targets = min(num_targets, self._num_blocks * context)

    def __len__(self) -> int:
        return self._num_blocks

    def rows(self, ids: Tensor) -> Batch:
        starts = ids * self.context
        block = self.tokens[starts.unsqueeze(1) + torch.arange(self.context + 1, device=ids.device)]
        batch = {"tokens": block[:, :-1], "labels": block[:, 1:]}
        if self.drop_last:
            return batch
        return batch | {"weight": (self.num_targets - starts).clamp(max=self.context).float()}

    def transform(self, batch: Batch) -> Batch:
        tokens, labels = batch["tokens"].long(), batch["labels"].long()
        if not self.drop_last:
            positions = torch.arange(self.context, device=labels.device)
            labels = labels.masked_fill(positions >= batch["weight"].unsqueeze(1), IGNORED)
        return batch | {"tokens": tokens, "labels": labels}


def load_tokens(data: str, tokenizer: Any, context: int) -> tuple[TokenDataset, TokenDataset]:
    """Loads a text and cuts it into blocks.

    Args:
        data: "stdlib" (the first megabyte of the source code of Python's standard library); a text file, or a
            folder of text files; or a Hub id.
        tokenizer: a tokenizer of transformers.
        context: tokens per block.

    Returns:
        (training set, evaluation set). If the source has only one split, its last tenth is held out.

    Raises:
        UsageError: no data, not text, or too short for a block.
    """
    parts = [_encode(part, tokenizer) for part in _load_text(data)]
    if len(parts) == 1:
        cut = len(parts[0]) * 9 // 10
        parts = [parts[0][:cut], parts[0][cut:]]
    train, evaluation = parts
    if len(train) <= context or len(evaluation) < 2:
        raise UsageError(
            f"--data {data} has {len(train)} training and {len(evaluation)} evaluation tokens: a block needs "
            f"{context + 1}; type a smaller --context or use more text"
        )
    return TokenDataset(train, context, drop_last=True), TokenDataset(evaluation, context, drop_last=False)


def _load_text(data: str) -> list[str]:
    if data == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
        return [text[:STDLIB_CHARACTERS]]
    path = Path(data).expanduser()
    if path.is_file():
        return [_read(path)]
    if path.is_dir() and not any(path.rglob("*.parquet")):
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".py"))
        if not files:
            raise UsageError(
                f"--data {data}: no .txt, .md or .py files there; type --data stdlib for the embedded text"
            )
        return ["\n".join(_read(file) for file in files)]
    if not path.is_dir() and (data.startswith((".", "/", "~")) or path.suffix == ".txt" or data.count("/") > 1):
        raise UsageError(f"--data {data}: no such file or folder; type --data stdlib for the embedded text")
    advice = "type --data stdlib for the embedded text, or --data FILE.txt"
    texts = []
    for split in load_splits(data, advice):
        if "text" not in split.column_names:
            raise UsageError(f"--data {data}: expected a text column, found {', '.join(split.column_names)}")
        texts.append("\n".join(split["text"]))
    return texts


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}): convert it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise UsageError(f"{path} is empty: expected text")
    return text


def _encode(text: str, tokenizer: Any) -> Tensor:
    if tokenizer.vocab_size == 256 and tokenizer.convert_tokens_to_ids("A") == ord("A"):  # bytes need no tokenizer
        return torch.from_numpy(numpy.frombuffer(text.encode(), numpy.uint8).copy())
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)
