"""Text as blocks of tokens: embedded, in files, or on the Hub."""

import sysconfig
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..data.batches import Batch, InMemoryDataset, RowDataset
from ..errors import UsageError
from .sources import load_splits
from .text_files import pieces, read_pieces, read_text
from .token_map import TokenMap, is_bytewise, tokenise

STDLIB_CHARACTERS = 1_000_000  # enough for a minute of training, and quick to evaluate
MAX_BYTES_IN_MEMORY = 16_000_000  # larger text is tokenised once, into a file
IGNORED = -100  # label of padding; torch's cross-entropy ignores it by default
TEXT_SUFFIXES, DATA_SUFFIXES = (".txt", ".md", ".py"), (".parquet", ".jsonl")
ADVICE = "type --data stdlib for the embedded text, or --data FILE.txt"
Tokens = Tensor | TokenMap


class TokenBlocks(RowDataset):
    """A text cut into blocks. Each token but the first is a label in exactly one sample.

    Samples are {"tokens": int64 of shape (context,), "labels": int64 of shape (context,), "weight":
    float32, 0-dim}. Each label is the next token. The end of the last block is padding with the label
    `IGNORED`. The weight is the number of labels without padding.

    Args:
        num_tokens: at least 2.
        context: tokens per block.
        drop_last: leave out a last block that is not full, as training does. All samples then have the
            same number of labels, and no "weight".
    """

    def __init__(self, num_tokens: int, context: int, drop_last: bool):
        self.context, self.drop_last = context, drop_last
        num_targets = num_tokens - 1
        self._num_blocks = num_targets // context if drop_last else -(-num_targets // context)
        self.num_targets = min(num_targets, self._num_blocks * context)

    @abstractmethod
    def read(self, starts: Tensor) -> Tensor:
        """context + 1 tokens from each start, of shape (batch, context + 1); zeros after the last token."""

    def __len__(self) -> int:
        return self._num_blocks

    def rows(self, ids: Tensor) -> Batch:
        starts = ids * self.context
        block = self.read(starts)
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


class TokenDataset(TokenBlocks, InMemoryDataset):
    """Blocks of a text whose tokens are in memory: an integer tensor of shape (n,)."""

    def __init__(self, tokens: Tensor, context: int, drop_last: bool):
        super().__init__(len(tokens), context, drop_last)
        padding = max(0, self._num_blocks * context - (len(tokens) - 1))
        self.tokens = torch.cat([tokens, tokens.new_zeros(padding)])

    def read(self, starts: Tensor) -> Tensor:
        return self.tokens[starts.unsqueeze(1) + torch.arange(self.context + 1, device=starts.device)]


class MappedTokenDataset(TokenBlocks):
    """Blocks of a text whose tokens stay in a file. The samples are those of `TokenDataset`."""

    def __init__(self, tokens: TokenMap, context: int, drop_last: bool):
        super().__init__(len(tokens), context, drop_last)
        self.tokens = tokens

    def read(self, starts: Tensor) -> Tensor:
        block = numpy.zeros((len(starts), self.context + 1), numpy.int64)
        for row, start in zip(block, starts.tolist()):
            found = self.tokens.read(start, self.context + 1)
            row[: len(found)] = found
        return torch.from_numpy(block)


def load_tokens(
    data: str, tokenizer: Any, context: int, max_samples: int | None = None
) -> tuple[TokenBlocks, TokenBlocks]:
    """Loads a text and cuts it into blocks.

    Text of up to `MAX_BYTES_IN_MEMORY` is tokenised as a whole, in memory, at each start. Larger text is tokenised
    once, in pieces, and the tokens stay in a file. A text file is cut at line ends, into pieces of 100 kB. A data
    set is tokenised row by row, with a newline between rows.

    Args:
        data: "stdlib" (the first megabyte of the source code of Python's standard library); a text file, or a
            folder of text files; a .jsonl or .parquet file with a text column, or a folder of them; or a Hub id.
        tokenizer: a tokenizer of transformers.
        context: tokens per block.
        max_samples: read only so many rows of a data set, as a stream; see `load_splits`.

    Returns:
        (training set, evaluation set). If the source has only one split, its last tenth is held out.

    Raises:
        UsageError: no data, not text, or too short for a block.
    """
    parts = _tokens(data, tokenizer, max_samples)
    if len(parts) == 1:
        cut = len(parts[0]) * 9 // 10
        parts = [parts[0][:cut], parts[0][cut:]]
    train, evaluation = parts
    if len(train) <= context or len(evaluation) < 2:
        raise UsageError(
            f"--data {data} has {len(train)} training and {len(evaluation)} evaluation tokens: a block needs "
            f"{context + 1}; type a smaller --context or use more text"
        )
    return _blocks(train, context, drop_last=True), _blocks(evaluation, context, drop_last=False)


def _blocks(tokens: Tokens, context: int, drop_last: bool) -> TokenBlocks:
    kind: Any = MappedTokenDataset if isinstance(tokens, TokenMap) else TokenDataset
    return kind(tokens, context, drop_last)


def _tokens(data: str, tokenizer: Any, max_samples: int | None) -> list[Tokens]:
    path = Path(data).expanduser()
    if _is_data_set(data, path):
        splits = load_splits(data, ADVICE, max_samples)
        for split in splits:
            if "text" not in split.column_names:
                raise UsageError(f"--data {data}: expected a text column, found {', '.join(split.column_names)}")
            if len(split) == 0:
                raise UsageError(f"--data {data}: a split has no rows")
        return _tokens_of_rows(data, splits, tokenizer)
    if max_samples is not None:
        raise UsageError(f"--max_samples counts rows of a data set, but --data {data} is plain text: remove it")
    if data == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
        return [_encode(text[:STDLIB_CHARACTERS], tokenizer)]
    files = [path] if path.is_file() else _text_files(path)
    if not files:
        raise UsageError(f"--data {data}: no .txt, .md or .py files there; type --data stdlib for the embedded text")
    num_bytes = sum(file.stat().st_size for file in files if file.exists())  # a link may lead nowhere
    if num_bytes > MAX_BYTES_IN_MEMORY:
        return [_tokenise_files(data, files, tokenizer, num_bytes)]
    return [_encode("\n".join(read_text(file) for file in files), tokenizer)]


def _is_data_set(data: str, path: Path) -> bool:
    """Whether the data are rows, not plain text. Raises UsageError for a path without data."""
    if data == "stdlib":
        return False
    if path.is_file():
        return path.suffix in DATA_SUFFIXES
    if path.is_dir():
        return any(path.rglob("*.parquet")) or (any(path.rglob("*.jsonl")) and not _text_files(path))
    if data.startswith((".", "/", "~")) or path.suffix in (".txt", *DATA_SUFFIXES) or data.count("/") > 1:
        raise UsageError(f"--data {data}: no such file or folder; type --data stdlib for the embedded text")
    return True


def _text_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in TEXT_SUFFIXES)


def _tokenise_files(data: str, files: list[Path], tokenizer: Any, num_bytes: int) -> TokenMap:
    import datasets  # not at the top: the import takes seconds

    rows = datasets.Dataset.from_dict(pieces(files))
    found = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return tokenise(rows, lambda batch, _: read_pieces(batch), tokenizer, repr(found), num_bytes, data)


def _tokens_of_rows(data: str, splits: list[Any], tokenizer: Any) -> list[Tokens]:
    sizes = [split.data.column("text").nbytes for split in splits]
    if sum(sizes) > MAX_BYTES_IN_MEMORY:
        return [_tokenise_rows(data, split, tokenizer, size) for split, size in zip(splits, sizes)]
    return [_encode("\n".join(_texts(data, split["text"], 0)), tokenizer) for split in splits]


def _tokenise_rows(data: str, split: Any, tokenizer: Any, num_bytes: int) -> TokenMap:
    last = len(split) - 1

    def read(batch: dict[str, list[Any]], ids: list[int]) -> list[str]:
        texts = _texts(data, batch["text"], ids[0])
        return [text + "\n" * (number < last) for number, text in zip(ids, texts)]

    title = f"{data}, {split.split}" if split.split else data
    return tokenise(split.select_columns("text"), read, tokenizer, split._fingerprint, num_bytes, title)


def _texts(data: str, texts: Iterable[Any], first: int) -> list[str]:
    found = list(texts)
    for number, text in enumerate(found, start=first):
        if not isinstance(text, str):
            raise UsageError(f"--data {data}: row {number} has no text: remove it")
    return found


def _encode(text: str, tokenizer: Any) -> Tensor:
    if is_bytewise(tokenizer):  # needs no tokenizer
        return torch.from_numpy(numpy.frombuffer(text.encode(), numpy.uint8).copy())
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)
