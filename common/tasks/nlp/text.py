"""Text as blocks of tokens: embedded, in files, or on the Hub."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ...data.sets import Batch, InMemoryDataset
from ...errors import UsageError
from ..models.causal_lm import IGNORED
from ..models.tokenization import digest_of, is_bytewise
from ..reading.rows import Table
from ..reading.sources import STDLIB, TABLES, check_not_streamed, files_of_folder, load_tables, walk
from ..reading.text_files import Place, ending_of, local_path, open_text
from ..streams import cache_folder, progress_bar, write_once

STDLIB_CHARACTERS = 1_000_000  # enough for a minute of training, and quick to evaluate
MAX_BYTES_IN_MEMORY = 16_000_000  # larger text is tokenised once, into a file
CHARACTERS_PER_PIECE = 100_000
CHARACTERS_PER_LINE = 50_000  # a piece ends within a line that is longer
CHARACTERS_PER_BATCH = 1_000_000  # characters to tokenise at one time
TEXTS = dict.fromkeys((".txt", ".md", ".py"), "text")
ADVICE = "use --data stdlib for the embedded text, or --data FILE.txt"
VERSION = 3  # of the files of tokens: a new number makes new files


class TokenDataset(InMemoryDataset):
    """A text cut into blocks. Each token but the first is a label in exactly one sample.

    Samples are {"tokens": int64 of shape (context,), "labels": int64 of shape (context,), "weight": float32, 0-dim}.
    Each label is the next token. The end of the last block is padding with the label `IGNORED`. The weight is the
    number of labels without padding.

    Args:
        tokens: integers of shape (n,), at least 2; or a part of `map_tokens(file)`: memory holds only what is read.
        context: tokens per block.
        drop_last: leave out a last block that is not full, as training does: then no sample has a "weight".
        file: a worker maps it again, instead of getting a copy of the tokens.
    """

    def __init__(self, tokens: Tensor, context: int, drop_last: bool, file: Path | None = None):
        self.tokens, self.context, self.drop_last = tokens, context, drop_last
        self.part = None if file is None else (file, tokens.storage_offset(), len(tokens))
        num_targets = len(tokens) - 1
        self._num_blocks = num_targets // context if drop_last else -(-num_targets // context)
        self.num_targets = min(num_targets, self._num_blocks * context)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | ({"tokens": None} if self.part else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.part:
            file, start, num_tokens = self.part
            self.tokens = map_tokens(file)[start : start + num_tokens]

    def __len__(self) -> int:
        return self._num_blocks

    def rows(self, ids: Tensor) -> Batch:
        if self.drop_last:
            # A view of overlapping blocks: copying its rows takes a third of the time that indexing each token takes.
            block = self.tokens.unfold(0, self.context + 1, self.context).index_select(0, ids)
            return {"tokens": block[:, :-1], "labels": block[:, 1:]}
        starts = ids * self.context
        positions = starts.unsqueeze(1) + torch.arange(self.context + 1, device=starts.device)
        block = self.tokens[positions.clamp_(max=len(self.tokens) - 1)]
        weight = (self.num_targets - starts).clamp(max=self.context).float()
        return {"tokens": block[:, :-1], "labels": block[:, 1:], "weight": weight}

    def transform(self, batch: Batch) -> Batch:
        tokens, labels = batch["tokens"].long(), batch["labels"].long()
        if not self.drop_last:
            positions = torch.arange(self.context, device=labels.device)
            labels = labels.masked_fill(positions >= batch["weight"].unsqueeze(1), IGNORED)
        return batch | {"tokens": tokens, "labels": labels}


def load_tokens(
    data: str, tokenizer: Any, context: int, max_samples: int | None = None, flag: str = "context"
) -> tuple[TokenDataset, TokenDataset]:
    """(training set, evaluation set): blocks of a text. If the source has only one split, its last tenth is held out.

    Text of up to `MAX_BYTES_IN_MEMORY` is tokenised as a whole, in memory, at each start. Larger text is tokenised
    once, in pieces, and the tokens stay in a file. Raises UsageError for missing data, no text, or less than a block.

    Args:
        data: "stdlib" (the first megabyte of the source code of Python's standard library); a text file, or a folder of
            .txt, .md and .py files; or what `load_tables` takes, with a text column.
        tokenizer: a tokenizer of transformers.
        context: tokens per block.
        max_samples: read only this many rows of a data set, as a stream; see `load_tables`.
        flag: the recipe's name for `context`.
    """
    texts = texts_of(data, max_samples)
    is_large = sum(text.num_bytes for text in texts) > MAX_BYTES_IN_MEMORY
    files = [_token_file(text, tokenizer) if is_large else None for text in texts]
    parts = [
        map_tokens(file) if file else _encode(["".join(text.pieces())], tokenizer) for text, file in zip(texts, files)
    ]
    if len(parts) == 1:
        cut = len(parts[0]) * 9 // 10
        parts, files = [parts[0][:cut], parts[0][cut:]], files * 2
    train, evaluation = parts
    if len(train) <= context or len(evaluation) < 2:
        advice = f"a block needs {context + 1}; use a smaller --{flag} or use more text"
        raise UsageError(f"--data {data} has {len(train)} training and {len(evaluation)} evaluation tokens: {advice}")
    return TokenDataset(train, context, True, files[0]), TokenDataset(evaluation, context, False, files[1])


@dataclass(frozen=True)
class Text:
    """A text to read in pieces."""

    name: str  # for messages
    key: object  # differs for each text
    num_bytes: int  # about
    pieces: Callable[[], Iterator[str]]  # gives strings that joined are the text; a large one is tokenised by piece


def texts_of(data: str, max_samples: int | None = None) -> list[Text]:
    """The text of each split. Raises UsageError."""
    files = [] if data == "stdlib" else _text_files(data)
    if files is None:
        return [_text_of_rows(table) for table in load_tables(data, ADVICE, max_samples)]
    check_not_streamed(data, max_samples)
    if data == "stdlib":
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(STDLIB.glob("*.py")))[:STDLIB_CHARACTERS]
        return [Text(data, None, len(text), lambda: iter([text]))]
    texts = []
    for places in files:
        facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in map(Path, places)]
        texts.append(Text(data, facts, sum(size for _, size, _ in facts), partial(_pieces, places)))
    return texts


def _text_files(data: str) -> list[list[Place]] | None:
    """The files with plain text of each split; None if the data are rows. Raises UsageError."""
    if (path := local_path(data)).is_file():
        return None if ending_of(path) in TABLES else [[path]]
    if not path.is_dir():
        return None
    found = {ending_of(file): Path(file).name for file in walk(path)[0]}
    if tables := [name for ending, name in found.items() if ending in TABLES]:
        if ".txt" in found:
            raise UsageError(f"--data {data} has {found['.txt']} and {tables[0]}: use the path of one")
        return None  # .md and .py files next to tables are about them
    return [*files_of_folder(data, path, TEXTS, ADVICE).values()][:2]


def _pieces(places: list[Place]) -> Iterator[str]:
    """The text of files in pieces of 100 kB, cut at line ends, with newlines for them and between files."""
    for place in places:
        with open_text(place, None) as file:
            piece = file.read(CHARACTERS_PER_PIECE) + file.readline(CHARACTERS_PER_LINE)
            if not piece:
                raise UsageError(f"{place} is empty: expected text")
            while piece:
                following = file.read(CHARACTERS_PER_PIECE) + file.readline(CHARACTERS_PER_LINE)
                yield piece + "\n" * (not following and place is not places[-1])
                piece = following


def _text_of_rows(table: Table) -> Text:
    if "text" not in table.column_names:
        raise UsageError(f"--data {table.name}: expected a text column, found {', '.join(table.column_names)}")

    def pieces() -> Iterator[str]:
        for number, text in enumerate(table.texts("text"), start=1):
            if text is None:
                raise UsageError(f"--data {table.name}: row {number} has no text: remove it")
            yield text + "\n" * (number < len(table))

    return Text(table.name, table.key, table.num_bytes, pieces)


def _token_file(text: Text, tokenizer: Any) -> Path:
    """The file with the tokens of a text, which the first process of each machine writes once."""
    name = "tokens.uint8" if is_bytewise(tokenizer) else "tokens.int32"

    def write(folder: Path) -> None:
        with (folder / name).open("wb") as file, progress_bar(text.num_bytes, "B") as bar:
            for batch in _batches(text.pieces()):
                _encode(batch, tokenizer).numpy().tofile(file)
                bar.update(sum(map(len, batch)))

    folder = cache_folder("tokens", VERSION, text.key, digest_of(tokenizer))
    write_once(folder, f"tokenising {text.name} ({text.num_bytes / 1e6:,.0f} MB)", write)
    return folder / name


def _batches(pieces: Iterator[str]) -> Iterator[list[str]]:
    size = 0

    def number_of(piece: str) -> int:
        nonlocal size
        size += len(piece)
        return size // CHARACTERS_PER_BATCH

    return ([*batch] for _, batch in groupby(pieces, number_of))


def map_tokens(file: Path) -> Tensor:
    """The tokens in a file, whose name ends with their type. Changes to them stay in memory."""
    kind: torch.dtype = getattr(torch, file.suffix[1:])
    size = file.stat().st_size // kind.itemsize
    return torch.from_file(str(file), size=size, dtype=kind) if size else torch.empty(0, dtype=kind)


def _encode(texts: list[str], tokenizer: Any) -> Tensor:
    """The tokens of all texts, one text after another: uint8 if they are bytes, otherwise int32."""
    if is_bytewise(tokenizer):  # needs no tokenizer
        return torch.from_numpy(numpy.frombuffer("".join(texts).encode(), numpy.uint8).copy())
    quiet = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}
    lists = tokenizer(texts, add_special_tokens=False, **quiet)["input_ids"]
    return torch.from_numpy(numpy.fromiter(chain.from_iterable(lists), numpy.int32, sum(map(len, lists))))
