"""Tokens in memory-mapped files, for text that does not fit into memory."""

import hashlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy

from .mapped import map_once

VERSION = 1  # of what `tokenise` writes: another number makes it work anew


class TokenMap:
    """Tokens in memory-mapped files, as one long array. Memory holds only what is read.

    Args:
        pieces: a `datasets.Dataset` with a column "tokens" of lists.
        start: the first token of this part.
        stop: the end of this part; None for the last token.
    """

    def __init__(self, pieces: Any, start: int = 0, stop: int | None = None):
        self._rows = pieces
        # Views of the file. Arrow holds the lists of a piece one after another.
        self._views = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in pieces.data.column("tokens").chunks]
        self._ends = numpy.cumsum([len(view) for view in self._views])
        self._start = start
        self._stop = (int(self._ends[-1]) if self._views else 0) if stop is None else stop

    def __getstate__(self) -> tuple[Any, int, int]:
        return self._rows, self._start, self._stop  # a worker opens the files itself

    def __setstate__(self, state: tuple[Any, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> Self:
        """A part of the tokens, which stay in the file."""
        start, stop, _ = part.indices(len(self))
        return type(self)(self._rows, self._start + start, self._start + max(start, stop))

    def read(self, start: int, num_tokens: int) -> numpy.ndarray:
        """A copy of the tokens from `start` on, int64; fewer than `num_tokens` at the end."""
        position = self._start + start
        stop = min(position + num_tokens, self._stop)
        parts = []
        number = int(numpy.searchsorted(self._ends, position, side="right"))
        while position < stop:
            view, end = self._views[number], int(self._ends[number])
            first = position - (end - len(view))
            parts.append(view[first : first + stop - position])
            position, number = end, number + 1
        return numpy.concatenate(parts, dtype=numpy.int64) if parts else numpy.empty(0, numpy.int64)


def tokenise(
    rows: Any,
    read: Callable[[dict[str, list[Any]], list[int]], list[str]],
    tokenizer: Any,
    key: str,
    num_bytes: int,
    title: str,
) -> TokenMap:
    """Tokenises texts, once: the first process of each machine does it, and later runs read the file.

    Args:
        rows: a `datasets.Dataset`.
        read: ({column: values of some rows}, their numbers) -> texts. Each is tokenised by itself.
        tokenizer: a tokenizer of transformers.
        key: names the texts; other texts have another key.
        num_bytes: the size of all texts, about.
        title: what the texts are, for the line that says that they are tokenised.
    """
    import datasets  # not at the top: the import takes seconds

    dtype = next(kind for kind in ("uint8", "uint16", "int32") if len(tokenizer) - 1 <= numpy.iinfo(kind).max)

    def encode(batch: dict[str, list[Any]], ids: list[int]) -> dict[str, list[Any]]:
        return {"tokens": [encoded(read(batch, ids), tokenizer, dtype)]}

    features = datasets.Features({"tokens": datasets.List(datasets.Value(dtype))})
    line = f"tokenising {title} ({num_bytes / 1e6:,.0f} MB); later runs read the tokens from the cache"
    return TokenMap(map_once(rows, encode, features, f"tokens {VERSION} {key} {digest_of(tokenizer)}", num_bytes, line))


def is_bytewise(tokenizer: Any) -> bool:
    """Whether the tokens are the bytes of UTF-8."""
    return tokenizer.vocab_size == 256 and tokenizer.convert_tokens_to_ids("A") == ord("A")


def encoded(texts: list[str], tokenizer: Any, dtype: str) -> numpy.ndarray:
    """The tokens of all texts, one text after another."""
    if is_bytewise(tokenizer):
        return numpy.frombuffer("".join(texts).encode(), numpy.uint8)
    quiet = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}
    lists = tokenizer(texts, add_special_tokens=False, **quiet)["input_ids"]
    return numpy.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))


def digest_of(tokenizer: Any) -> str:
    """A digest of the tokenizer's files."""
    with TemporaryDirectory() as folder:
        paths = sorted(Path(path) for path in tokenizer.save_pretrained(folder))
        contents = [path.name.encode() + path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(b"".join(contents)).hexdigest()
