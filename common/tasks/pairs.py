"""Pairs of texts that belong together: embedded, in a file, or on the Hub."""

import ast
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UsageError
from .rows import Table, rows_with_text
from .sources import hold_out, load_tables

# Modules and packages that Python 3.11 to 3.13 have, without parts that a distribution may leave out.
MODULES = (
    "asyncio collections datetime doctest email enum http imaplib importlib inspect ipaddress logging mailbox "
    "multiprocessing pathlib pdb pydoc statistics tarfile threading typing unittest urllib xml zipfile _pydecimal _pyio"
)
FEWEST_WORDS = 4  # of a docstring: fewer say too little
HELD_OUT = 10  # one pair in so many is for evaluation, if the source has no evaluation part
ADVICE = "use --data stdlib for the embedded pairs, or the path of a .csv, .jsonl or .parquet file"

Pair = tuple[str, str]


class EncodedPairs(Dataset):
    """Samples {"query": int64 of shape (length,), "document": the same}.

    Args:
        pairs: the texts.
        tokenizer: a tokenizer of transformers.
        max_length: tokens beyond this number are left out.
    """

    def __init__(self, pairs: list[Pair], tokenizer: Any, max_length: int):
        self.queries, self.documents = (
            [
                torch.tensor(tokens)
                for tokens in tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
            ]
            for texts in zip(*pairs)
        )

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"query": self.queries[index], "document": self.documents[index]}


def load_pairs(
    data: str, query_column: str = "query", document_column: str = "document"
) -> tuple[list[Pair], list[Pair]]:
    """Loads pairs of texts.

    Args:
        data: "stdlib" (docstrings of Python's standard library, each with its function); or what `load_tables` takes.
        query_column: name of the column with the first texts.
        document_column: name of the column with the second texts.

    Returns:
        (training pairs, evaluation pairs). If the source has only one part, one pair in ten is held out.

    Raises:
        UsageError: no data, no such column, an empty text, or fewer than two pairs in a part.
    """
    if data == "stdlib":
        parts = [_standard_library()]
    else:
        parts = [_rows(table, query_column, document_column) for table in load_tables(data, ADVICE)]
    if len(parts) == 1:
        parts = [[parts[0][number] for number in ids.sort().values] for ids in hold_out(len(parts[0]), HELD_OUT)]
    train, evaluation = parts
    if min(len(train), len(evaluation)) < 2:
        raise UsageError(
            f"--data {data} has {len(train)} training and {len(evaluation)} evaluation pairs: expected two or more of "
            f"both, so {2 * HELD_OUT} rows if it has no evaluation part"
        )
    return train, evaluation


def _standard_library() -> list[Pair]:
    """The first paragraph of each function's docstring, and the function without it. They differ a little between
    versions of Python. A docstring that several functions share counts once."""
    folder, pairs = Path(sysconfig.get_path("stdlib")), dict[str, str]()
    for name in MODULES.split():
        for path in [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
                    continue
                words = (ast.get_docstring(node) or "").split("\n\n")[0].split()
                if len(words) >= FEWEST_WORDS:
                    del node.body[0]
                    pairs.setdefault(" ".join(words), ast.unparse(node))
    return list(pairs.items())


def _rows(table: Table, query_column: str, document_column: str) -> list[Pair]:
    table.check_columns({"--query_column": query_column, "--document_column": document_column})
    return [(query, document) for query, document in rows_with_text(table, query_column, document_column)]
