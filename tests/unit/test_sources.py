"""Promise: the file that is named is the file that is read, and nothing in a folder is left out without a line."""

import json
import os
import re
from pathlib import Path

import pytest

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.mixture import weights_of
from accelerate_recipes.common.tasks.sources import load_tables
from accelerate_recipes.common.tasks.text import load_tokens
from accelerate_recipes.common.tasks.tokenization import byte_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, *names: str) -> Path:
    """Files of rows that hold their own names."""
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) + "\n" if "json" in name else f'text\n"{name}"\n')
    return path


def found(path: Path, *more: str) -> list[list[str]]:
    return [[row["text"] for row in table] for table in load_tables(str(path), "type something else", *more)]


NAMES = "a[1].csv a*b.csv a?.csv 100%.csv a%20b.csv ~a.csv {a,b}.csv -x.csv a..csv train.csv test.csv データ.csv"


@pytest.mark.parametrize(
    "name", [*NAMES.split(), "a:1,b:2.csv", "two words .csv", "$HOME.csv", "a#b.jsonl", "freight-train-0.csv"]
)
def test_the_file_named_is_the_file_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, name, "a1.csv", "ab.csv", "axb.csv", "a b.csv")
    monkeypatch.chdir(tmp_path)
    assert found(tmp_path / name) == found(Path(name)) == [[name]] and capsys.readouterr().out == ""
    assert weights_of(name) is None


@pytest.mark.parametrize("folder", ["a[1]", "a*", "train", "data.csv", "two words", "-x", "a."])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_folder_named_is_the_folder_read(tmp_path: Path, folder: str, ending: str) -> None:
    import pyarrow.parquet

    write(tmp_path, "a1/no.csv", "ab/no.csv")
    write(tmp_path / folder, "x[2]-test.csv")
    if ending == "parquet":
        (tmp_path / folder / "x[2]-test.csv").unlink()
        path = tmp_path / folder / "x[2]-test.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": ["x[2]-test.csv"]}), path)
    assert found(tmp_path / folder) == [["x[2]-test.csv"]]


FOLDERS = [
    (["train.csv", "test.csv"], [["train.csv"], ["test.csv"]], "1 for train, 1 for test"),
    (["Training/a.csv", "dev/b.csv"], [["Training/a.csv"], ["dev/b.csv"]], "1 for train, 1 for validation"),
    (
        ["data/train-00000-of-00002.csv", "data/train-00001-of-00002.csv"],
        [["data/train-00000-of-00002.csv", "data/train-00001-of-00002.csv"]],
        None,
    ),
    (["freight-train-0.csv", "my_test.csv", "a.csv"], [["a.csv", "freight-train-0.csv", "my_test.csv"]], None),
    (["2023.csv", "2024.csv", "test.csv"], [["2023.csv", "2024.csv"], ["test.csv"]], "2 for train, 1 for test"),
    (
        ["train.csv", "test.csv", "valid.csv", "more.csv", "notes.txt"],
        [["train.csv"], ["test.csv"]],
        "1 for train, 1 for test, 3 not read, such as notes.txt",
    ),
    (["a.jsonl", ".hidden.jsonl", "README.md"], [["a.jsonl"]], "1 for train, 2 not read, such as .hidden.jsonl"),
]


@pytest.mark.parametrize(("names", "expected", "line"), FOLDERS)
def test_splits_are_whole_names(
    tmp_path: Path, names: list[str], expected: list[list[str]], line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "set", *names)
    assert found(folder) == expected
    out = capsys.readouterr().out
    assert out == ("" if line is None else f"files of --data {folder}, by their names: {line}\n")


REFUSED = [
    (["a.csv", "a.jsonl"], "holds a.csv and a.jsonl, which may be the same: use the path of one"),
    (["a.csv", "a.csv.gz"], "a.csv.gz, which may be the same"),
    (["notes.txt"], "holds no .csv, .tsv, .json, .jsonl, .ndjson, .parquet file; type something else"),
    (["test.csv"], "expected a train split, found test"),
]


@pytest.mark.parametrize(("names", "line"), REFUSED)
def test_folders_that_cannot_be_read(tmp_path: Path, names: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        found(write(tmp_path / "set", *names))


@pytest.mark.parametrize("data", ["./nothing", "a/b/c", "no.csv", "no.jsonl.gz", "a b", "~nobody/x"])
def test_what_is_no_path_and_no_id(data: str) -> None:
    with pytest.raises(UsageError, match="no such file or folder; type something else"):
        found(Path(data) if not data.startswith("./") else Path("nothing/"), *()) if False else load_tables(
            data, "type something else"
        )


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        load_tables("x" * 300, "")


def test_a_pipe_and_a_link_to_nowhere(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    (tmp_path / "b.csv").symlink_to("nowhere")
    for name in ("a.csv", "b.csv"):
        with pytest.raises(UsageError, match="is not a file or folder that can be read"):
            found(tmp_path / name)


def test_links_pipes_and_files_about_data_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "set", "a.csv", "dataset_infos.json", "below/b.csv")
    (folder / "below" / "loop").symlink_to(folder)
    (folder / "c.csv").symlink_to("nowhere")
    os.mkfifo(folder / "d.csv")
    write(tmp_path / "other", "e.csv")
    (folder / "linked").symlink_to(tmp_path / "other")
    assert found(folder) == [["a.csv", "below/b.csv", "e.csv"]]
    assert "3 for train, 4 not read, such as loop" in capsys.readouterr().out


def test_a_card_says_which_files_belong_to_which_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", "a1.jsonl", "a2.jsonl", "b.jsonl", "c.jsonl")
    (folder / "a1.jsonl").write_text('{"text": "2024-01-01"}\n')
    files = "[{split: train, path: 'a*.jsonl'}, {split: test, path: b.jsonl}]"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\nWords.\n")
    assert found(folder) == [["2024-01-01", "a2.jsonl"], ["b.jsonl"]]


def test_text_and_rows_for_a_language_model(tmp_path: Path) -> None:
    for name in ("rows.json", "rows.csv"):  # rows, not their source
        content = (
            '[{"text": "abc"}, {"text": "defghijkl"}]' if name == "rows.json" else 'text,x\nabc,1\n"defghijkl",2\n'
        )
        (tmp_path / name).write_text(content)
        train, evaluation = load_tokens(str(tmp_path / name), byte_tokenizer(), 2)
        assert bytes([*train.tokens.tolist(), *evaluation.tokens.tolist()]) == b"abc\ndefghijkl"
    with pytest.raises(UsageError, match=re.escape("holds a.txt and rows")):
        (tmp_path / "a.txt").write_text("text")
        load_tokens(str(tmp_path), byte_tokenizer(), 2)
    write(tmp_path / "books", "train.txt", "valid.txt", "test.txt")
    train, evaluation = load_tokens(str(tmp_path / "books"), byte_tokenizer(), 2)
    assert bytes(train.tokens.tolist()) == b'text\n"train.txt"\n'
    assert bytes(evaluation.tokens.tolist()) == b'text\n"test.txt"\n'
