"""Promise: the file that is named is the file that is read, and nothing in a folder is left out without a line."""

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.chat import preferences
from accelerate_recipes.common.tasks.chat.chats import load_chats
from accelerate_recipes.common.tasks.chat.vision_chats import load_vision_chats
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp.labelled_texts import load_labelled_texts
from accelerate_recipes.common.tasks.nlp.pairs import load_pairs
from accelerate_recipes.common.tasks.nlp.questions import load_questions
from accelerate_recipes.common.tasks.nlp.tagged_words import load_tagged_words
from accelerate_recipes.common.tasks.nlp.text import load_tokens
from accelerate_recipes.common.tasks.nlp.translations import load_translations
from accelerate_recipes.common.tasks.reading.labelled_images import load_image_splits
from accelerate_recipes.common.tasks.reading.mixture import weights_of
from accelerate_recipes.common.tasks.reading.sources import load_tables, names_of_splits
from accelerate_recipes.common.tasks.reading.text_files import local_path


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


def found(path: Path, *more: int) -> list[list[str]]:
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
        "2 for train",
    ),
    (["train-v2.0.csv", "dev-v2.0.csv"], [["train-v2.0.csv"], ["dev-v2.0.csv"]], "1 for train, 1 for validation"),
    (
        ["en_ewt-ud-train.csv", "en_ewt-ud-dev.csv"],
        [["en_ewt-ud-train.csv"], ["en_ewt-ud-dev.csv"]],
        "1 for train, 1 for validation",
    ),
    (["freight-train-0.csv", "my_test.csv", "a.csv"], [["a.csv", "freight-train-0.csv", "my_test.csv"]], "3 for train"),
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
    tmp_path: Path, names: list[str], expected: list[list[str]], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "set", *names)
    assert found(folder) == expected
    out = capsys.readouterr().out
    assert out == f"files of --data {folder}, by their names: {line}\n"


def test_names_of_splits_are_those_of_files() -> None:
    assert names_of_splits("x", ["dev", "training"]) == ["training", "dev"]
    assert names_of_splits("x", ["val", "eval", "Train", "other"]) == ["Train", "eval", "val"]
    with pytest.raises(UsageError, match="expected a train split, found train_sft"):
        names_of_splits("x", ["train_sft"])


REFUSED = [
    (["a.csv", "a.jsonl"], "holds a.csv and a.jsonl, which may have the same data: use the path of one"),
    (["a.csv", "a.csv.gz"], "a.csv.gz, which may have the same data"),
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


def test_an_empty_path(tmp_path: Path) -> None:
    assert local_path("", tmp_path) == tmp_path  # an empty cell of a table: its reader names the row
    with pytest.raises(UsageError, match="a path is empty: use the path of a file or folder"):
        load_tables("", "")


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


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_configuration_after_a_colon(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "set"
    for name in ("cola", "mrpc", "mrpc_test"):
        rows = datasets.Dataset.from_dict({"text": [name]})
        folder.mkdir(exist_ok=True)
        rows.to_json(folder / f"{name}.jsonl") if kind == "jsonl" else rows.to_parquet(folder / f"{name}.parquet")
    of_mrpc = f"[{{split: train, path: mrpc.{kind}}}, {{split: test, path: mrpc_test.{kind}}}]"
    configs = f"- config_name: cola\n  data_files: cola.{kind}\n- config_name: mrpc\n  data_files: {of_mrpc}\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for max_samples in (None, 5):
        tables = load_tables(f"{folder}:mrpc", "", max_samples)
        assert [[*table.texts("text")] for table in tables] == [["mrpc"], ["mrpc_test"]]
    for data in (folder, f"{folder}:sst"):
        with pytest.raises(UsageError, match=f"has configurations .cola, mrpc.: use --data {folder}:cola"):
            load_tables(str(data), "")


def test_splits_with_an_end(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", "a.jsonl", "b.jsonl", "c.jsonl")
    files = "".join(f"  - split: {name}\n    path: {name[-1]}.jsonl\n" for name in ("train_a", "test_b", "test_a"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    assert [[*table.texts("text")] for table in load_tables(f"{folder}:a", "")] == [["a.jsonl"], ["a.jsonl"]]
    with pytest.raises(UsageError, match=f"found train_a, test_b, test_a: use --data {folder}:a for train_a"):
        load_tables(str(folder), "")


def test_text_and_rows_for_a_language_model(tmp_path: Path) -> None:
    for name in ("rows.json", "rows.csv"):  # rows, not their source
        content = (
            '[{"text": "abc"}, {"text": "defghijkl"}]' if name == "rows.json" else 'text,x\nabc,1\n"defghijkl",2\n'
        )
        (tmp_path / name).write_text(content)
        train, evaluation = load_tokens(str(tmp_path / name), byte_tokenizer(), 2)
        assert bytes([*train.tokens.tolist(), *evaluation.tokens.tolist()]) == b"abc\ndefghijkl"
    with pytest.raises(UsageError, match=re.escape("has a.txt and rows")):
        (tmp_path / "a.txt").write_text("text")
        load_tokens(str(tmp_path), byte_tokenizer(), 2)
    write(tmp_path / "books", "train.txt", "valid.txt", "test.txt")
    train, evaluation = load_tokens(str(tmp_path / "books"), byte_tokenizer(), 2)
    assert bytes(train.tokens.tolist()) == b'text\n"train.txt"\n'
    assert bytes(evaluation.tokens.tolist()) == b'text\n"test.txt"\n'


def labelled(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("empty", [{"label": -1}, {"label": -1.0}, {"label": None}, {"label": ""}, {"number": 1}])
def test_a_part_without_classes_is_no_evaluation(
    tmp_path: Path, empty: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, object]] = [{"text": f"a{number}", "label": number % 2} for number in range(10)]
    labelled(tmp_path / "train.jsonl", rows)
    labelled(tmp_path / "test.jsonl", [{"text": "t"} | empty] * 4)
    train, evaluation = load_labelled_texts(str(tmp_path))
    assert (len(train.samples), len(evaluation.samples), train.classes) == (8, 2, ["0", "1"])
    assert "the test split has no labels: it is left out" in capsys.readouterr().out
    labelled(tmp_path / "dev.jsonl", rows[:3])
    train, evaluation = load_labelled_texts(str(tmp_path))
    assert (len(train.samples), len(evaluation.samples)) == (10, 3)
    assert "the test split has no labels: validation is read in its place" in capsys.readouterr().out


@pytest.mark.parametrize("empty", ["missing", None, [-100, -100]])
def test_a_part_without_labels_of_other_tasks(tmp_path: Path, empty: Any) -> None:
    """Tags, translations, answers and others: the validation split is read in place of such a test split."""
    asked, answered = ({"role": role, "content": "<image>a"} for role in ("user", "assistant"))
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    cells = {"words": ["a", "b"], "tags": ["O", "B-X"], "translation": {"en": "a", "de": "b"}}
    cells |= {"context": "a b", "question": "?", "answers": {"text": ["b"], "answer_start": [2]}}
    cells |= {"query": "a", "document": "b", "prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    cells |= {"messages": [asked, answered], "images": ["a.png"]}
    rows: list[dict[str, object]] = [
        cells | {"context": f"a b {number}", "document": f"b {number}"} for number in range(4)
    ]
    labels = dict.fromkeys(("tags", "translation", "answers", "document", "completion", "chosen", "rejected"), empty)
    labels |= {"messages": [asked]}
    given = {name: cell for name, cell in cells.items() if name not in labels} if empty == "missing" else cells | labels
    for name, part in (("train", rows), ("dev", rows[:3]), ("test", [given] * 2)):
        labelled(tmp_path / f"{name}.jsonl", part)
    assert len(load_tagged_words(str(tmp_path), "words", "tags", list)[1].samples) == 3
    assert len(load_translations(str(tmp_path), "translation.en", "translation.de", list)[1]) == 3
    assert len(load_questions(str(tmp_path), "context", "question", "answers", list)[1]) == 3
    assert len(load_pairs(str(tmp_path))[1]) == 3
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one.role + one.content + '|' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant{% endif %}"
    assert [len(load_chats(str(tmp_path), tokenizer, 99, column)[1]) for column in ("messages", "none")] == [3, 3]
    assert len(preferences.load_pairs(str(tmp_path), tokenizer, 99)[1]) == 6
    assert len(load_vision_chats(str(tmp_path), "messages", "images")[1].rows) == 3


def test_pairs_from_which_nothing_can_be_learnt(tmp_path: Path) -> None:
    """Equal documents without negatives, and equal scores."""
    pairs: list[dict[str, object]] = [{"query": f"q{number}", "document": "d", "score": 1.0} for number in range(20)]
    labelled(tmp_path / "a.jsonl", pairs)
    with pytest.raises(UsageError, match=r"all documents for training are the same \(d\): expected different ones"):
        load_pairs(str(tmp_path / "a.jsonl"))
    with pytest.raises(UsageError, match=r"all scores for training are the same \(1.0\): expected different ones"):
        load_pairs(str(tmp_path / "a.jsonl"), score_column="score")
    labelled(tmp_path / "a.jsonl", [pair | {"negative": "n"} for pair in pairs])
    assert len(load_pairs(str(tmp_path / "a.jsonl"))[0]) == 18
    labelled(tmp_path / "a.jsonl", [pair | {"score": number} for number, pair in enumerate(pairs)])
    assert len(load_pairs(str(tmp_path / "a.jsonl"), score_column="score")[0]) == 18


def test_images_of_a_part_without_classes(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    for name, labels in (("train", [0, 1]), ("test", [-1, -1]), ("validation", [1])):
        rows = {"image": [Image.new("L", (4, 4))] * len(labels), "label": labels}
        Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / f"{name}.parquet"))
    assert [part.labels for part in load_image_splits(str(tmp_path), "")] == [[0, 1], [1]]
    (tmp_path / "test.parquet").rename(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match="train: row 1 has no class in column label: fill or remove it"):
        load_image_splits(str(tmp_path), "")


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    parts = {
        name: Dataset.from_dict({"text": [f"{name} {number}" for number in range(5)]}) for name in ("train", "test")
    }
    parts["test"].save_to_disk(str(tmp_path / "one"))
    DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    assert found(tmp_path / "one") == [[f"test {number}" for number in range(5)]]
    assert found(tmp_path / "both", 2) == [["train 0", "train 1"], ["test 0", "test 1"]]
    with pytest.raises(UsageError, match="use the folder that save_to_disk wrote, or write to_parquet"):
        found(tmp_path)
    (tmp_path / "one" / "state.json").unlink()
    with pytest.raises(UsageError, match="the files cannot be read"):
        found(tmp_path / "one")
    next(tmp_path.glob("both/test/*.arrow")).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match=r"arrow is a Git LFS pointer, not the file itself: run git lfs pull"):
        found(tmp_path / "both")


def test_the_output_of_runs_is_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path / "set", "a.jsonl", "outputs/x/metrics.jsonl", "outputs/x/model/a.csv", "metrics.jsonl", "model/b.csv"
    )
    for folder in ("set", "set/outputs/x"):
        (tmp_path / folder / "run.json").write_text('{"command": "recipe.py"}')
    assert found(tmp_path / "set") == [["a.jsonl"]]
    assert "1 for train, 4 not read, such as metrics.jsonl" in capsys.readouterr().out
    for name in ("cat/1.png", "dog/2.png", "outputs/x/confusion.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "images" / name)
    (tmp_path / "images/outputs/x/run.json").write_text('{"command": "recipe.py"}')
    assert load_image_splits(str(tmp_path / "images"), "")[0].classes == ["cat", "dog"]
    assert "left out: output of runs: 1, such as outputs/x" in capsys.readouterr().out
