"""Promise: a large text is tokenised once, stays in a file, and gives the samples that it would give in memory."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp import text
from accelerate_recipes.common.tasks.nlp.text import TokenDataset, load_tokens
from support.small_model import write_model

AWKWARD = "naïve 日本\r\nline\rtab\t\n\n" * 40 + "é" * 300 + "\n"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All text counts as large, and has many pieces and batches."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(text, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(text, "CHARACTERS_PER_PIECE", 101)
    monkeypatch.setattr(text, "CHARACTERS_PER_LINE", 64)
    monkeypatch.setattr(text, "CHARACTERS_PER_BATCH", 700)


def in_memory(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], tuple[TokenDataset, ...]]
) -> tuple[TokenDataset, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(text, "MAX_BYTES_IN_MEMORY", 2**40)
        return load()


def assert_same_samples(mapped_set: TokenDataset, expected: TokenDataset) -> None:
    assert mapped_set.part and not expected.part
    assert len(mapped_set) == len(expected)
    ids = torch.randperm(len(expected)).tolist()
    found, wanted = mapped_set.__getitems__(ids), expected.__getitems__(ids)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values)


def test_files_give_the_samples_of_the_text_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, content in enumerate([AWKWARD, "one line without an end", AWKWARD[::-1]]):
        (tmp_path / f"{number}.txt").write_bytes(content.encode())
    for context in (8, 33):

        def load(context: int = context) -> tuple[TokenDataset, ...]:
            return load_tokens(str(tmp_path), byte_tokenizer(), context)

        for found, expected in zip(load(), in_memory(monkeypatch, load)):
            assert_same_samples(found, expected)
    assert len(list(tmp_path.rglob("tokens.*"))) == 1  # one text, whatever the context


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_give_the_samples_of_the_text_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [f"{number} {AWKWARD[number : 3 * number]}" for number in range(120)]
    for split, part in (("train", rows[:90]), ("test", rows[90:])):
        write = getattr(
            Dataset.from_dict({"text": part, "other": part}), "to_parquet" if kind == "parquet" else "to_json"
        )
        write(str(folder / f"{split}.{kind}"))

    def load() -> tuple[TokenDataset, ...]:
        return load_tokens(str(folder), byte_tokenizer(), 16)

    for found, expected in zip(load(), in_memory(monkeypatch, load)):
        assert_same_samples(found, expected)


def test_tokens_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    write_model(tmp_path / "tiny", num_positions=48)
    path = tmp_path / "words.txt"
    path.write_text("one two three four\n" * 500)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")

    def load() -> tuple[TokenDataset, ...]:
        return load_tokens(str(path), tokenizer, 16)

    for found, expected in zip(load(), in_memory(monkeypatch, load)):
        assert_same_samples(found, expected)


def test_second_load_tokenises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(AWKWARD * 3)
    calls = []
    encoded = text._encode
    monkeypatch.setattr(text, "_encode", lambda *arguments: calls.append(1) or encoded(*arguments))
    first = load_tokens(str(path), byte_tokenizer(), 16)[0]
    assert calls and "tokenising" in capsys.readouterr().out
    calls.clear()
    second = load_tokens(str(path), byte_tokenizer(), 16)[0]
    assert not calls and "tokenising" not in capsys.readouterr().out
    assert torch.equal(first[3]["tokens"], second[3]["tokens"])
    path.write_bytes(b"B" + path.read_bytes()[1:])
    changed = load_tokens(str(path), byte_tokenizer(), 16)[0]
    assert calls and changed[0]["tokens"][0] == ord("B")


def test_another_tokenizer_has_other_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "words.txt"
    path.write_text("one two three four\n" * 500)
    write_model(tmp_path / "tiny", num_positions=48)
    file = tmp_path / "tiny" / "tokenizer.json"
    found = []
    for _ in range(2):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
        found.append(load_tokens(str(path), tokenizer, 16)[0][0]["tokens"][:4].tolist())
        swapped = json.loads(file.read_text())
        swapped["model"]["vocab"] |= {"one": 2, "two": 1}
        file.write_text(json.dumps(swapped))
    assert found == [[1, 2, 3, 4], [2, 1, 3, 4]]


def test_work_that_failed_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text(AWKWARD * 10)
    encoded, calls = text._encode, []

    def fails_late(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encoded(*arguments)

    monkeypatch.setattr(text, "_encode", fails_late)
    with pytest.raises(KeyboardInterrupt):
        load_tokens(str(path), byte_tokenizer(), 16)
    assert [file.parent.suffix for file in tmp_path.rglob("tokens.uint8")] == [".unfinished"]
    found = load_tokens(str(path), byte_tokenizer(), 16)[0]
    expected = in_memory(monkeypatch, lambda: load_tokens(str(path), byte_tokenizer(), 16))[0]
    assert_same_samples(found, expected)
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_worker_gets_the_path_of_the_file_not_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(AWKWARD * 10)
    _, eval_set = load_tokens(str(path), byte_tokenizer(), 16)
    sent = pickle.dumps(eval_set)
    assert len(sent) < len(path.read_bytes()) / 2
    assert torch.equal(pickle.loads(sent)[1]["tokens"], eval_set[1]["tokens"])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("text.txt", b"good\n" * 100 + b"\xff\xfe", "text.txt is not text in UTF-8 (invalid start byte at byte 500)"),
        ("text.txt", b"x" * 20, "has 18 training and 2 evaluation tokens: a block needs 65"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": null}\n', "row 2 has no text: remove it"),
        ("rows.jsonl", b'{"word": "a"}\n', "expected a text column, found word"),
        ("rows.jsonl", b"no json\n", "rows.jsonl, line 1: Expecting value"),
        ("rows.parquet", b"no parquet\n", "rows.parquet: the files cannot be read"),
    ],
)
def test_bad_input(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_tokens(str(tmp_path / name), byte_tokenizer(), 64)


@pytest.mark.parametrize("data", ["stdlib", "text.txt"])
def test_max_samples_of_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(AWKWARD)
    with pytest.raises(UsageError, match=f"--data {data} has none: remove it"):
        load_tokens(data, byte_tokenizer(), 8, max_samples=5)
