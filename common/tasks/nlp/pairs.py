"""Pairs of texts that belong together: embedded, in a file, or on the Hub."""

import ast
import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...data.facts import say
from ...data.sets import ListDataset
from ...errors import UsageError
from ..models.tokenization import rows_with_tokens
from ..reading.labelled import check_differ
from ..reading.rows import Table, rows_with_text
from ..reading.sources import HELD_OUT, STDLIB, divide, load_tables

# Modules and packages that Python 3.11 to 3.13 have, without parts that a distribution may leave out.
MODULES = (
    "asyncio collections datetime doctest email enum http imaplib importlib inspect ipaddress logging mailbox "
    "multiprocessing pathlib pdb pydoc statistics tarfile threading typing unittest urllib xml zipfile _pydecimal _pyio"
)
FEWEST_WORDS = 4  # of a docstring: fewer say too little
ADVICE = "use --data stdlib for the embedded pairs, or the path of a .csv, .jsonl or .parquet file"


class Pair(NamedTuple):
    """Texts that belong together: a query, its document, and wrong documents. Or two texts, and their similarity."""

    texts: tuple[str, ...]
    score: float | None = None


class EncodedPairs(ListDataset):
    """Samples {"query": int64 of shape (length,), "document", "negative_1", ...: the same; "text_ids": int64 of shape
    (texts,), the same for equal texts; and "score": float32, 0-dim, if the pairs have one}.

    Args:
        pairs: each with the same number of texts.
        tokenizer: a transformers tokenizer.
        max_length: tokens beyond this number are left out.
        prompts: {"query": text before each query, "document": text before each other text}
    """

    def __init__(self, pairs: list[Pair], tokenizer: Any, max_length: int, prompts: dict[str, str]):
        names = text_names([pairs])
        begins = [prompts["query" if name == "query" else "document"] for name in names]
        # Outer white space is removed, as in sentence-transformers.
        texts = [[(begin + pair.texts[at]).strip() for pair in pairs] for at, begin in enumerate(begins)]
        encoded = [tokenizer(column, truncation=True, max_length=max_length) for column in texts]
        self.samples = []
        for row in rows_with_tokens(*encoded):
            sample = {name: torch.tensor(one["input_ids"][row]) for name, one in zip(names, encoded)}
            digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in pairs[row].texts]
            sample["text_ids"] = torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests])
            score = pairs[row].score
            self.samples.append(sample if score is None else sample | {"score": torch.tensor(score)})


def text_names(parts: list[list[Pair]]) -> list[str]:
    """The names of the texts of each pair. Raises UsageError if parts of the data differ in their negatives."""
    if len(numbers := {len(part[0].texts) for part in parts}) > 1:
        raise UsageError("parts of --data differ in columns of negatives: name the ones to use with --negative_column")
    return ["query", "document", *(f"negative_{number}" for number in range(1, numbers.pop() - 1))]


def load_pairs(
    data: str,
    query_column: str = "query",
    document_column: str = "document",
    negative_column: str | None = None,
    score_column: str | None = None,
) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, evaluation pairs) of texts. If the source has only one part, one pair in ten is held out. Raises
    UsageError.

    Args:
        data: "stdlib" (docstrings of Python's standard library, each with its function); or what `load_tables` takes.
        query_column: name of the column with the first texts.
        document_column: name of the column with the second texts.
        negative_column: columns with wrong documents, with commas; None: those called negative, or negative_1, ...
        score_column: name of a column with the similarity of the two texts, a number; then there are no negatives.
    """
    if data == "stdlib":
        if negative_column or score_column:
            raise UsageError("--data stdlib has no negatives and no scores: use the path of a file that has them")
        parts = [_standard_library()]
    else:
        columns = query_column, document_column, negative_column, score_column
        tables = load_tables(data, ADVICE, None, lambda table: table.has_classes(document_column))
        parts = [_rows(table, *columns) for table in tables]
    train, evaluation = divide(parts)
    if min(len(train), len(evaluation)) < 2:
        advice = f"expected two or more of each, so {2 * HELD_OUT} rows if it has no evaluation part"
        raise UsageError(f"--data {data} has {len(train)} training and {len(evaluation)} evaluation pairs: {advice}")
    others = [pair.score if score_column else text for pair in train for text in pair.texts[1:]]
    check_differ(data, others, "scores for training" if score_column else "documents for training")
    return train, evaluation


def documented_functions() -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """(function, its docstring) of `MODULES`. They differ a little between versions of Python."""
    for name in MODULES.split():
        for path in [STDLIB / f"{name}.py", *sorted((STDLIB / name).rglob("*.py"))]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                    docstring = ast.get_docstring(node) or ""
                    if len(docstring.split("\n\n")[0].split()) >= FEWEST_WORDS:
                        yield node, docstring


def _standard_library() -> list[Pair]:
    """The first paragraph of each function's docstring, and the function without it. Skips repeated docstrings."""
    pairs = dict[str, str]()
    for node, docstring in documented_functions():
        del node.body[0]
        pairs.setdefault(" ".join(docstring.split("\n\n")[0].split()), ast.unparse(node))
    return [Pair(texts) for texts in pairs.items()]


def _rows(table: Table, query: str, document: str, negative: str | None, score: str | None) -> list[Pair]:
    found = [name for name in table.column_names if re.fullmatch(r"negative(_\d+)?", name) and score is None]
    negatives = found if negative is None else [name.strip() for name in negative.split(",") if name.strip()]
    table.check_columns({"--query_column": query, "--document_column": document})
    for name in negatives:
        table.check_columns({"--negative_column": name})
    table.say_unread(query, document, *negatives, score or "")
    if score is None:
        if negatives:
            say(f"--data {table.name}: negatives in {', '.join(negatives)}")
        return [Pair(texts) for texts in rows_with_text(table, query, document, *negatives)]
    table.check_columns({"--score_column": score})
    if negatives:
        raise UsageError("--score_column does not work with negatives: remove --negative_column")
    rows = rows_with_text(table, query, document, beside=[*table.numbers(score)])
    return [Pair(tuple(texts), number) for *texts, number in rows]
