"""Promise: what stands in a table is what is read, the same from each format, and a broken file gets one line."""

import bz2
import csv
import gzip
import json
import lzma
import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.nlp.labelled_texts import load_labelled_texts
from accelerate_recipes.common.tasks.nlp.pairs import load_pairs
from accelerate_recipes.common.tasks.reading import rows
from accelerate_recipes.common.tasks.reading.rows import Table, table_of
from accelerate_recipes.common.tasks.reading.sources import load_tables

# Texts that readers with types change: dates, numbers, truth values, missing values, spaces, quotes, line ends.
AWKWARD = [
    *("2024-01-01", "2024-01-01 10:00:00", "042", "42", "1.1", "1.10", "1.0", "1", "250.00", "1e5", "-1", "0x1F"),
    *("NA", "N/A", "nan", "null", "None", "true", "True", " a ", "a,b", 'a "b" c', "a\nb", "a\r\nb", "a\tb", "'", "é"),
    *("\N{LINE SEPARATOR}x", "1_000", "inf", "日本", "\N{GRINNING FACE}", "#N/A", "[1]", '{"a": 1}', "=1+1"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, columns: dict[str, list[Any]]) -> str:
    """Writes a table in the format of the name's ending, with Python's own modules and pyarrow."""
    lines = [*zip(*columns.values())]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t").writerows([columns, *lines])
    else:
        text = "".join(json.dumps(dict(zip(columns, line))) + "\n" for line in lines)
        path.write_text(text if path.suffix == ".jsonl" else "[" + ",\n ".join(text.splitlines()) + "]")
    return str(path)


def texts(data: str, column: str = "text") -> list[str | None]:
    (table,) = load_tables(data, "")
    return [*table.texts(column)]


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_text_is_the_text_that_stands_there(
    tmp_path: Path, ending: str, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_BYTES_IN_MEMORY", 2**30 if in_memory else 0)
    data = write(tmp_path / f"rows.{ending}", {"text": AWKWARD, "label": AWKWARD[::-1]})
    assert texts(data) == AWKWARD and texts(data, "label") == AWKWARD[::-1]


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl"])
def test_numbers_are_the_text_that_stands_there(tmp_path: Path, ending: str) -> None:
    values = ["1.10", "1.1", "250.00", "1e5", "42", "-1", "0", "123456789012345678901234567890"]
    path = tmp_path / f"rows.{ending}"
    lines = values if ending == "csv" else [f'{{"text": {value}}}' for value in values]
    path.write_text(
        "text\n" + "\n".join(lines)
        if ending == "csv"
        else "\n".join(lines)
        if ending == "jsonl"
        else f"[{', '.join(lines)}]"
    )
    assert texts(str(path)) == values


PARQUET = {
    "categories": (pyarrow.array(["b", "a", "b"]).dictionary_encode(), ["b", "a", "b"]),
    "dates": ([date(2024, 1, 1), date(2024, 12, 31), None], ["2024-01-01", "2024-12-31", None]),
    "times": ([datetime(2024, 1, 1), datetime(2024, 1, 1, 10)] * 1, ["2024-01-01", "2024-01-01 10:00:00"]),
    "large": (pyarrow.array(["042", "42"], pyarrow.large_string()), ["042", "42"]),
    "decimals": ([Decimal("250.00"), Decimal("250.10")], ["250.00", "250.10"]),
    "halves": (pyarrow.array([0.1, 1.0], pyarrow.float32()), ["0.1", "1.0"]),
    "wholes": ([1, 0, -1], ["1", "0", "-1"]),
    "truths": ([True, False], ["true", "false"]),
    "nan": ([1.0, float("nan")], ["1.0", None]),
    "bytes": ([b"a", "é".encode()], ["a", "é"]),
}


@pytest.mark.parametrize("name", PARQUET)
def test_types_of_parquet(tmp_path: Path, name: str) -> None:
    values, expected = PARQUET[name]
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "rows.parquet")
    assert texts(str(tmp_path / "rows.parquet")) == expected


def test_classes_of_a_typed_column_keep_their_names_and_order(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a"])})
    labels = [0, 1] * 5
    whole = datasets.Dataset.from_dict({"text": [f"t{n}" for n in range(10)], "label": labels}, features=features)
    whole.to_parquet(str(tmp_path / "rows.parquet"))
    train, evaluation = load_labelled_texts(str(tmp_path / "rows.parquet"))
    assert train.classes == ["z", "a"] and sorted(train.labels + evaluation.labels) == sorted(labels)
    assert all(int(text[1:]) % 2 == label for text, label in zip(train.samples, train.labels))
    (tmp_path / "none.jsonl").write_text('{"text": "a", "label": null}\n')
    with pytest.raises(UsageError, match="row 1 has no class in column label"):
        load_labelled_texts(str(tmp_path / "none.jsonl"))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": partial(bz2.compress, compresslevel=1),  # its first bytes name the level
    "xz": lzma.compress,
    "ZST": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", ["rows.CSV", "rows.Tsv", "rows.JSONL", "rows.Json"])
def test_endings_in_any_case_and_packed(tmp_path: Path, name: str, packing: str) -> None:
    plain = Path(write(tmp_path / name.lower(), {"text": AWKWARD}))
    (tmp_path / f"{name}.{packing}").write_bytes(PACKERS[packing](plain.read_bytes()))
    assert texts(str(tmp_path / f"{name}.{packing}")) == AWKWARD


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_marks_of_encodings(tmp_path: Path, name: str, encoding: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = "text,label\r\nnaïve,1\r\n" if name == "rows.csv" else '{"text": "naïve"}\r\n'
    (tmp_path / name).write_bytes(content.encode(encoding))
    assert texts(str(tmp_path / name)) == ["naïve"]
    assert ("is read as UTF-" in capsys.readouterr().out) == (encoding != "utf-8-sig")


def test_half_of_a_character(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n{"text": "\\\\ud83d"}\n')
    assert texts(str(tmp_path / "rows.jsonl")) == ["a\N{REPLACEMENT CHARACTER}", "\N{GRINNING FACE}", "\\ud83d"]
    assert capsys.readouterr().out.startswith("1 rows have half of a character")


def test_nan_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": NaN}\n{"text": "NaN"}\n')
    assert texts(str(tmp_path / "rows.jsonl")) == [None, "NaN"]


def test_columns_that_a_recipe_does_not_name_are_left_alone(tmp_path: Path) -> None:
    lines = [{"text": f"t{n}", "label": "ab"[n % 2], "note": None if n < 40 else ["x", {"y": n}]} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train, evaluation = load_labelled_texts(str(tmp_path / "rows.jsonl"))
    assert len(train.samples) + len(evaluation.samples) == 60
    with pytest.raises(UsageError, match=re.escape("row 41, column note: expected text, found list ['x'")):
        load_labelled_texts(str(tmp_path / "rows.jsonl"), "note")


def test_a_long_cell_and_a_row_without_a_cell(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"text,label\n{'x' * 3_000_000}\nb,1\n")
    assert texts(str(tmp_path / "rows.csv")) == ["x" * 3_000_000, "b"]
    assert texts(str(tmp_path / "rows.csv"), "label") == [None, "1"]


def test_rows_without_a_text_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rows.csv", "rows.jsonl"):
        columns = {"query": [f"q{n}" for n in range(40)], "document": ["", " ", *(f"d{n}" for n in range(38))]}
        train, evaluation = load_pairs(write(tmp_path / name, columns))
        assert len(train) + len(evaluation) == 38
        assert (
            "2 of 40 rows have no text in column query or document, such as row 1: left out" in capsys.readouterr().out
        )


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
BROKEN = [
    ("a.csv", b"text,label\nfoo,1,2\n", 'row 1 has 3 values, the header has 2 names: put text that contains ","'),
    ("a.csv", b'text,label\n"foo,1\nbar,2\n', "line 3: unexpected end of data: put text that contains quotes in"),
    (
        "a.csv",
        b'text,label\n"quoted" word,1\n',
        "line 2: ',' expected after '\"': put text that contains quotes in quotes",
    ),
    ("a.csv", b"text,text\nfoo,1\n", "several columns called text"),
    ("a.csv", b"text,label\ncaf\xe9,1\n", "is not text in UTF-8 (invalid continuation byte at byte 14): convert it"),
    (
        "a.csv",
        "text,label\nfoo,1\n".encode("utf-16-le"),
        "holds zero bytes: it is not UTF-8 text; run iconv",
    ),
    ("a.jsonl", '{"text": "foo"}\n'.encode("utf-16-le"), "holds zero bytes: it is not UTF-8 text"),
    ("a.csv", "\ntext\nfoo\n".encode("utf-16-le"), "holds zero bytes: it is not UTF-8 text"),
    ("a.csv", "\ntext\nfoo\n".encode("utf-16-be"), "holds zero bytes: it is not UTF-8 text"),
    ("a.csv", b"PK\x03\x04\x14\x00", "is a workbook of Excel, or a zip archive: save it as CSV, or unpack it"),
    ("a.jsonl", b"\xd0\xcf\x11\xe0\xa1\xb1", "is a workbook of Excel, or a zip archive"),
    ("a.csv", b"PAR1\x15\x04\0", "is a Parquet file: let its name end with .parquet"),
    ("a.csv", b'{"text": "foo"}\n', "is no .csv but JSON or HTML"),
    ("a.tsv", b"\n<!DOCTYPE html>\n<html>", "is no .tsv but JSON or HTML"),
    ("a.csv", b"", "has no rows"),
    ("a.csv", b"text,label\n", "has no rows"),
    ("a.csv.gz", gzip.compress(b"text,label\n" * 9999)[:50], "is damaged"),
    ("a.csv.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 30, "cannot be read: ZSTD decompress failed"),
    ("a.csv.gz", b"text,label\na,b\n", "is not a .gz file: remove .gz from its name, or copy it again"),
    ("a.csv.bz2", b"text,label\na,b\n", "is not a .bz2 file: remove .bz2 from its name, or copy it again"),
    ("a.csv", gzip.compress(b"text"), "is compressed: rename it to a.csv.gz, or unpack it"),
    ("a.csv.gz", gzip.compress(gzip.compress(b"text")), "is compressed: rename it to a.csv.gz.gz, or unpack it"),
    ("a.jsonl", bz2.compress(b"text"), "is compressed: rename it to a.jsonl.bz2, or unpack it"),
    ("a.jsonl", lzma.compress(b"text"), "is compressed: rename it to a.jsonl.xz, or unpack it"),
    (
        "a.tsv",
        pyarrow.compress(b"text", codec="zstd", asbytes=True),
        "is compressed: rename it to a.tsv.zst, or unpack",
    ),
    ("a.jsonl", b"", "has no rows"),
    ("a.json", b"[]", "has no rows"),
    ("a.json", b'[{"text": "a"} {"text": "b"}]', 'the list continues with \'{"text": "b"}]\''),
    ("a.json", b'[{"text": "a"},', "the list does not end with ]"),
    ("a.jsonl", b'{"text": "a", "text": "b"}', "line 1: the name text occurs twice in one object"),
    ("a.jsonl", b'{"text": "a"}\n"x"\n', 'line 2: it holds "x": expected one object per line'),
    ("a.jsonl", b'{"text": "a"}\n{"text": b}\n', "line 2: Expecting value"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, "line 1: maximum recursion depth"),
    ("a.parquet", POINTER, "is a Git LFS pointer, not the file itself: run git lfs pull"),
    ("a.csv.gz", POINTER, "is a Git LFS pointer"),
    ("a.jsonl", POINTER, "is a Git LFS pointer"),
    ("a.parquet", b"no parquet", "the files cannot be read"),
    ("a.pdf", b"%PDF", "its name must end with one of .csv, .tsv, .json"),
]


@pytest.mark.parametrize(("name", "content", "line"), BROKEN, ids=[line for *_, line in BROKEN])
def test_broken_files(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(line)) as caught:
        load_tables(str(tmp_path / name), "")
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_max_rows_reads_the_first(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.csv", {"text": AWKWARD})
    (table,) = load_tables(data, "", max_samples=3)
    assert isinstance(table, Table) and [row["text"] for row in table] == AWKWARD[:3]


def test_files_that_are_not_on_this_machine(tmp_path: Path) -> None:
    """As those of the Hub, by their addresses: read once, from front to back, and kept on disk."""
    plain = Path(write(tmp_path / "rows.csv", {"text": AWKWARD}))
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    address = f"file://{plain}"
    for place in (address, f"{address}.gz"):
        table = table_of("somebody/rows", [place], None, {})
        assert [*table.texts("text")] == AWKWARD and table.column_names == ["text"]
    with pytest.raises(UsageError, match="nothing"):
        table_of("somebody/rows", [address.replace("rows", "nothing")], None, {})


WORDS = [f"w{number}" for number in range(30)]
SWALLOWED = "\n".join(f"{word}\t{number % 2}" for number, word in enumerate(['"open', *WORDS, 'close"']))
TABS = [  # (rows of a .tsv file, the first text, number of rows, what the line says if there is one)
    (SWALLOWED, '"open', 32, "are text, as usual in TSV: 32 rows (1 as CSV)"),
    ('5 o"clock\t1\n"quoted" word\t0', '5 o"clock', 2, None),
    ('"a whole sentence"\t1\nb\t0', '"a whole sentence"', 2, "are text, as usual in TSV: 2 rows (2 as CSV)"),
    ('"open\t1\nb\t0', '"open', 2, None),
    ('"he said ""hi"""\t1\nb\t0', 'he said "hi"', 2, "surround cells, as in CSV: 2 rows (2 as text)"),
    ('"two\nlines"\t1\nb\t0', "two\nlines", 2, "surround cells, as in CSV: 2 rows (3 as text)"),
    ('"a\ttab"\t1\nb\t0', "a\ttab", 2, "surround cells, as in CSV: 2 rows (2 as text)"),
]


@pytest.mark.parametrize(("lines", "first", "size", "line"), TABS, ids=range(len(TABS)))
def test_quotes_between_tabs(
    tmp_path: Path, lines: str, first: str, size: int, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tsv").write_text(f"text\tlabel\n{lines}\n", encoding="utf-16")
    (table,) = load_tables(str(tmp_path / "a.tsv"), "")
    assert (len(table), table[0]["text"]) == (size, first)
    out = capsys.readouterr().out.splitlines()
    assert [text.partition("quotation marks ")[2] for text in out] == ([""] if line is None else ["", line])
    with gzip.open(tmp_path / "b.tsv.gz", "wt") as file:  # what R writes
        file.write('"text"\t"label"\n"a"\t"1"\n')
    assert texts(str(tmp_path / "b.tsv.gz")) == ["a"]


@pytest.mark.parametrize("first", ["sep=;", "SEP=;\r", '"sep=;"', "sep=;\n"])
def test_the_separator_that_excel_writes_first(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.csv").write_text(f"{first}\ntext;label\n1,5;a\n")
    assert texts(str(tmp_path / "a.csv")) == ["1,5"]


def test_a_missing_column_names_the_parts_of_cells(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "translation": {"en": "one", "de": "eins"}}\n')
    (table,) = load_tables(str(tmp_path / "a.jsonl"), "")
    with pytest.raises(UsageError, match=r"use --source_column with one of id, translation\.en, transla"):
        table.check_columns({"--source_column": "en"})
    table.check_columns({"--source_column": "translation.en"})


def test_a_dict_that_became_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("translation\n\"{'de': 'Haus', 'en': 'house'}\"\n")
    table = load_tables(str(tmp_path / "a.csv"), "")[0]
    line = "a cell has a list or dict as text, {'de': 'Haus', 'en': 'house'}: use a real one, in JSON lines or parquet"
    with pytest.raises(UsageError, match=re.escape(f"a.csv, row 1, column translation: {line}")):
        list(table.values("translation.de"))


WRAPPED = [
    '{"version": 1, "data": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]}',
    '{"columns": ["text", "label"], "index": [0, 1], "data": [["a", "x"], ["b", "y"]]}',
    '{"text": {"0": "a", "1": "b"}, "label": {"0": "x", "1": "y"}}',
]


@pytest.mark.parametrize("content", WRAPPED)
def test_rows_inside_one_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    line = '; it has one row: expected one object per line, such as {"text": "Why?"}, or one list of them'
    with pytest.raises(UsageError, match=re.escape(line)):
        load_labelled_texts(str(tmp_path / "a.json"))


def test_parquet_files_without_rows_or_of_different_columns(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", {"text": ["a"], "label": ["x"]})
    write(tmp_path / "train-1.parquet", {"sentence": ["a"], "label": ["x"]})
    line = "one has the columns text, label, another sentence, label: give all the same columns"
    with pytest.raises(UsageError, match=line):
        load_tables(str(tmp_path), "")
    data = write(tmp_path / "none.parquet", {"text": pyarrow.array([], pyarrow.string())})
    for max_samples, line in ((None, r"cannot be read \(a file has no rows: remove it\)"), (5, "has no rows")):
        with pytest.raises(UsageError, match=line):
            load_tables(data, "", max_samples)
