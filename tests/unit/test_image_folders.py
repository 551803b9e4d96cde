"""Promise: a folder of images is read as it is: names are names, and what is left out is counted in a line."""

import io
import os
import re
from collections import Counter
from pathlib import Path

import numpy
import pytest
from PIL import Image

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.reading.labelled import Labelled
from accelerate_recipes.common.tasks.reading.labelled_images import load_image_splits
from accelerate_recipes.common.tasks.reading.mixture import weights_of
from accelerate_recipes.common.tasks.vision.cropped_images import load_labelled_images
from accelerate_recipes.common.tasks.vision.images import load_images

Out = pytest.CaptureFixture[str]


def write(folder: Path, *names: str) -> None:
    """Images of 4 x 4, the first byte of whose colour is their number."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / name, "PNG")


def load(folder: Path | str, max_samples: int | None = None) -> list[Labelled]:
    return load_image_splits(str(folder), "use --data shapes", max_samples)


def found(part: Labelled) -> list[tuple[str, int]]:
    """(class, number of the image) of each image"""
    return [(part.classes[label], image.getpixel((0, 0))[0]) for label, image in zip(part.labels, part.samples)]


STRANGE = (
    *(
        "train",
        "test",
        "[ab]",
        "a*",
        "**",
        "?",
        "100%",
        "%s",
        "{x}",
        "a b",
        " a",
        "-rf",
        "--data",
        "日本",
        "عربي",
        "é",
        "e\u0301",
        "no.",
        "~",
    ),
    *(
        "#1",
        "a:3",
        "a,b",
        "'q'",
        '"q"',
        "$HOME",
        "\\n",
        "a.png",
        "nan",
        "null",
        "1",
        "01",
        "1.0",
        "TRUE",
        "__pycache__",
        "CON",
    ),
)


def test_names_of_folders_and_files_are_no_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    names = [f"{folder}/{file}.png" for folder in STRANGE for file in ("[0-9]*", "-x train-test validation", "é%20?")]
    write(tmp_path / "data", *names)
    (part,) = load(tmp_path / "data")
    assert {*found(part)} == {(name.split("/")[0], number) for number, name in enumerate(names)}
    assert f"{len(names)} images" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    for name in (
        "[ab]*",
        "-data",
        "~",
        "a:1",
        "train",
        "x.parquet",
        "test.csv",
        "a,b",
        "a:1,b:2",
        "a.yaml",
        "日本.",
        " ",
    ):
        write(tmp_path / name, "cat/0.png", "dog/1.png")
        write(tmp_path / "a", "wrong/0.png", "other/0.png")  # what a pattern would find
        assert found(load(name)[0]) == [("cat", 0), ("dog", 1)] and weights_of(name) is None


def test_split_names_within_names_split_nothing(tmp_path: Path) -> None:
    names = [
        f"{kind}/{file}" for kind in ("bus", "car", "rail") for file in ("freight-train-0.png", "test.png", "a_val.png")
    ]
    write(tmp_path, *names)
    assert found(load(tmp_path)[0]) == [
        (name.split("/")[0], number) for number, name in sorted(enumerate(names), key=lambda pair: pair[1])
    ]
    train, evaluation = load_labelled_images(str(tmp_path))
    assert len(train.labels) == 8 and len(evaluation.labels) == 1


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ("train/cat/0 train/dog/1 test/cat/2", ["cat0 dog1", "cat2"]),
        ("Training/cat/0 Training/dog/1 VAL/cat/2", ["cat0 dog1", "cat2"]),
        ("train/cat/0 train/dog/1 val/cat/2 test/dog/3", ["cat0 dog1", "dog3"]),
        ("train/cat/0 train/dog/1", ["cat0 dog1"]),
        ("train/cat/0 train/dog/1 test/2", ["cat0 dog1"]),  # without classes
        ("train/cat/0 train/dog/1 test/2 val/dog/3", ["cat0 dog1", "dog3"]),
        ("train/0 bus/1 car/2", ["bus1 car2 train0"]),
        ("train/0 test/1 bus/2", ["bus2 test1 train0"]),
        ("train/old/0 bus/1", ["bus1 train0"]),
        ("test/a/0 bus/1", ["bus1 test0"]),
        ("train_1/cat/0 test_1/dog/1", ["test_11 train_10"]),
        ("cat/0 dog/deep/deeper/1 2", ["cat0 dog1"]),
        ("cat/train/0 cat/test/1 dog/train/2", ["cat1 cat0 dog2"]),
    ],
)
def test_parts_are_folders_with_exactly_their_names(tmp_path: Path, files: str, parts: list[str]) -> None:
    write(tmp_path, *[f"{file}.png" for file in files.split()])
    numbers = [int(file.rpartition("/")[2]) for file in files.split()]
    assert numbers == sorted(numbers)
    assert [" ".join(f"{name}{number}" for name, number in found(part)) for part in load(tmp_path)] == parts


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            "train/a/0 test/a/1 unlabelled/2",
            "train and test hold folders with images, like the splits of a dataset, but unlabelled is next to",
        ),
        ("train/0 test/1", "have no classes: expected a folder with a sub-folder for each class, such as cat/1.png"),
        ("test/a/0 val/a/0", "has a folder test, but none called train"),
        ("0 1", "have no classes: expected a folder with a sub-folder for each class"),
        (
            "",
            "no data there; expected a folder with a sub-folder for each class, such as cat/1.png and dog/2.png, or",
        ),
    ],
)
def test_folders_without_a_meaning(tmp_path: Path, files: str, line: str) -> None:
    write(tmp_path, *[f"{file}.png" for file in files.split()])
    for loader in (load, load_labelled_images, load_images):
        with pytest.raises(UsageError, match=re.escape(line)):
            loader(str(tmp_path))


def test_what_there_is_instead_of_images_is_named(tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()
    for name in ("data.zip", "cat/a.heic", "cat/b.heic"):
        (tmp_path / name).touch()
    with pytest.raises(
        UsageError, match=r"no data there \(files without the name of an image: 3, such as cat/a.heic\); expected"
    ):
        load(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write(tmp_path, "assets/figure.png")
    (tmp_path / "train.parquet").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="files cannot be read"):
        load(tmp_path)
    assert capsys.readouterr().out.endswith("1 for train, 4 not read, such as figure.png\n")


def test_one_class(tmp_path: Path) -> None:
    write(tmp_path, "cat/0.png", "cat/1.png")
    with pytest.raises(
        UsageError, match="has images of one class, cat: expected two or more, such as a sub-folder for each"
    ):
        load_labelled_images(str(tmp_path))


@pytest.mark.parametrize("name", ["one.png", "notes.txt", "pictures.zip", "a.csv", "a.json"])
def test_files_that_are_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    line = rf"{re.escape(name)} is a file: expected a folder with a sub-folder for each"
    for loader in (load_labelled_images, load_images):
        with pytest.raises(UsageError, match=line):
            loader(str(tmp_path / name))


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: Out) -> None:
    write(
        tmp_path,
        "cat/a.PNG",
        "cat/b.JPeG",
        "dog/c.tif",
        "dog/old/d.png",
        "beside.png",
        "cat/._e.png",
        "dog/.hidden/f.png",
    )
    for name in ("cat/notes.txt", ".DS_Store", "cat/Thumbs.db", "cat/no-ending"):
        (tmp_path / name).write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dog" / "linked.png").symlink_to(tmp_path / "cat" / "a.PNG")
    (tmp_path / "bird").symlink_to(tmp_path / "cat")
    (tmp_path / "dog" / "broken.png").symlink_to("nowhere.png")
    (tmp_path / "dog" / "loop.png").symlink_to("loop.png")
    (tmp_path / "dog" / "above").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "dog" / "pipe.png")
    (part,) = load(tmp_path)
    assert Counter(found(part)) == {
        ("bird", 0): 1,
        ("bird", 1): 1,
        ("cat", 0): 1,
        ("cat", 1): 1,
        ("dog", 2): 1,
        ("dog", 3): 1,
        ("dog", 0): 1,
    }
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and len({*lines}) == 3
    for fact in (
        "hidden: 4, such as .DS_Store",  # once more in bird
        "files without the name of an image: 6, such as bird/Thumbs.db",
        "broken links: 2, such as dog/broken.png",
        "links to a folder above: 1, such as dog/above/",
        "no ordinary files: 1, such as dog/pipe.png",
        "empty folders: 1, such as empty/",
        "images next to the folders of classes: 1, such as beside.png",
    ):
        assert fact in lines[1], lines[1]
    assert lines[0] == "images in deeper folders: 1, such as dog/old/d.png, whose class is dog"
    assert lines[2].endswith("7 images for training and evaluation, 3 classes: bird 2, cat 2, dog 3")


def test_names_that_no_terminal_shows(tmp_path: Path, capsys: Out) -> None:
    write(tmp_path, "a\nb/0.png", os.fsdecode(b"\xff/1.png"), "c/x\x1b[1m.txt.png")
    (tmp_path / os.fsdecode(b"\xfe")).write_text("")
    assert len({*found(load(tmp_path)[0])}) == 3
    assert capsys.readouterr().out.encode().count(b"\n") == 2


def test_splits_and_their_leavings_are_said(tmp_path: Path, capsys: Out) -> None:
    write(tmp_path, "train/cat/0.png", "train/dog/1.png", "test/cat/2.png", "test/eel/3.png", "val/cat/4.png")
    train, test = load(tmp_path)
    assert train.classes == test.classes == ["cat", "dog", "eel"] and found(test) == [("cat", 2), ("eel", 3)]
    lines = capsys.readouterr().out.splitlines()
    assert "train for training and test for evaluation: these folders are splits, not classes" in lines[0]
    assert "left out: images in other folders: 1, such as val/cat/4.png" in lines[1]
    assert lines[2].endswith("2 images for training and 2 images for evaluation, 3 classes: cat 2, dog 1, eel 1")
    assert lines[3].endswith("classes in the evaluation, but in no image for training: eel")


def test_long_lists_of_classes_are_cut(tmp_path: Path, capsys: Out) -> None:
    write(tmp_path, *[f"{number:03}/{name}.png" for number in range(200) for name in "ab"])
    load(tmp_path)
    assert capsys.readouterr().out.endswith("200 classes: 000 2, 001 2, 002 2, 003 2, 004 2, 005 2, ... (200 in all)\n")


def test_max_samples_takes_images_of_all_classes(tmp_path: Path) -> None:
    write(tmp_path, *[f"{name}/{number}.png" for name in ("a", "b") for number in range(50)])
    (part,) = load(tmp_path, 20)
    assert len(part.labels) == 20 and {*part.labels} == {0, 1} and found(part) == found(load(tmp_path, 20)[0])


METADATA = [
    ("metadata.csv", "\ufefffile_name,label,note\r\n0.png,042,\r\nsub/1.png,42,x\r\n2.png,NA,\r\n"),
    (
        "metadata.jsonl",
        '{"file_name": "0.png", "label": "042"}\n{"file_name": "sub/1.png", "label": 42}\n\n'
        '{"label": "NA", "file_name": "2.png"}\n',
    ),
]


@pytest.mark.parametrize(("name", "content"), METADATA)
@pytest.mark.parametrize("below", ["", "train/"])
def test_tables_of_classes(tmp_path: Path, name: str, content: str, below: str, capsys: Out) -> None:
    write(tmp_path / below, "0.png", "sub/1.png", "2.png", "sub/3.png")
    (tmp_path / below / name).write_bytes(content.encode())
    assert found(load(tmp_path)[0]) == [("042", 0), ("42", 1), ("NA", 2)]
    assert f"left out: images that {name} does not name: 1, such as {below}sub/3.png\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("file_name,label\n0.png,a\n1.png,\n", "metadata.csv: row 2 lacks file_name or label"),
        ("file_name,label\n0.png,a\nlost.png,b\n", "metadata.csv: row 2 names lost.png: no such file"),
        ("file_name,label\n0.png,\xff\n", "metadata.csv is not text in UTF-8"),
        ("file_name,text\n0.png,a\n", "have no classes"),
        ('{"file_name": ["0.png"], "label": "a"}', "metadata.jsonl: row 1: expected text, found list ['0.png']"),
        ('{"file_name": "0.png", "label": {"a": 1}}', "metadata.jsonl: row 1: expected text, found dict {'a': 1}"),
        ("file_name,label\n0.png,a\n1.png,b\n./0.png,b\n", "metadata.csv names 0.png twice, with two labels: keep"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, content: str, line: str) -> None:
    write(tmp_path, "0.png", "1.png")
    (tmp_path / f"metadata.{'jsonl' if content[0] == '{' else 'csv'}").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=re.escape(line)):
        load(tmp_path)


@pytest.mark.parametrize("names", [["b", "a"], None, "texts"])
def test_tables_of_images(tmp_path: Path, names: list[str] | str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits and transparency mean the same in a column of `datasets` as in a file."""
    from datasets import ClassLabel, Dataset, Features, Value

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = []
    for number, image in enumerate((Image.fromarray(numpy.full((4, 4), 45000, "<u2")), Image.new("LA", (4, 4)))):
        file = io.BytesIO()
        image.save(file, "PNG")
        rows.append(
            {"image": {"bytes": file.getvalue(), "path": None}, "label": "ba"[number] if names == "texts" else number}
        )
    image = {"bytes": Value("binary"), "path": Value("string")}
    label = ClassLabel(names=names) if isinstance(names, list) else Value("string" if names else "int64")
    (tmp_path / "data").mkdir()
    Dataset.from_list(rows, features=Features({"image": image, "label": label})).to_parquet(
        str(tmp_path / "data" / "train.parquet")
    )
    (part,) = load(tmp_path / "data")
    assert part.classes == {"texts": ["a", "b"]}.get(str(names), names or ["0", "1"])
    classes = ["0", "1"] if names is None else ["b", "a"]
    assert [
        (part.classes[label], image.getpixel((0, 0)), image.mode) for label, image in zip(part.labels, part.samples)
    ] == [
        (classes[0], 175, "L"),
        (classes[1], 255, "L"),
    ]


def test_tables_of_paths(tmp_path: Path) -> None:
    from pyarrow import Table, large_string, parquet, schema

    write(tmp_path, "0.png", "1.png")
    rows = [{"image": f"{number}.png", "label": "ab"[number]} for number in (0, 1)]
    kinds = schema([("image", large_string()), ("label", large_string())])
    parquet.write_table(Table.from_pylist(rows, kinds), tmp_path / "train.parquet")
    (part,) = load(tmp_path)
    assert part.classes == ["a", "b"] and part.samples.name(1) == str(tmp_path / "1.png") and part.samples[1]


def test_grey_images_of_one_size_for_mnist(tmp_path: Path) -> None:
    """Each grey form keeps one channel; colour makes three."""
    images = {
        "deep": (Image.fromarray(numpy.full((6, 5), 45000, "<u2")), 175),
        "bit": (Image.new("1", (5, 6), 1), 255),
        "clear": (Image.new("LA", (5, 6), (0, 128)), 127),
        "grey": (Image.new("L", (5, 6), 77), 77),
    }
    for name, (image, _) in images.items():
        (tmp_path / name).mkdir()
        for number in range(5):
            image.save(tmp_path / name / f"{number}.png")
    train, evaluation = load_images(str(tmp_path))
    assert train.image_shape == (1, 6, 5) and len(train) + len(evaluation) == 20 and train.classes == sorted(images)
    for part in (train, evaluation):
        expected = [images[part.classes[label]][1] for label in part.labels]
        assert part.images[:, 0, 0, 0].tolist() == expected
    Image.new("RGB", (5, 6), "red").save(tmp_path / "grey" / "9.png")
    assert load_images(str(tmp_path))[0].image_shape == (3, 6, 5)
    Image.new("L", (7, 6)).save(tmp_path / "grey" / "a.png")
    with pytest.raises(
        UsageError, match=rf"{tmp_path}/bit/0.png has 6 x 5 pixels, {tmp_path}/grey/a.png 6 x 7: expected one size"
    ):
        load_images(str(tmp_path))


def test_files_are_not_opened_at_the_start(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(100):
            (tmp_path / folder / f"{number}.jpg").touch()
    (part,) = load(tmp_path)
    assert len(part.labels) == 200
    with pytest.raises(UsageError, match=rf"{tmp_path}/a/0.jpg cannot be read \(it is empty\)"):
        part.samples[0]


def test_one_table_above_the_folders_of_splits(tmp_path: Path) -> None:
    names = [f"{part}/{number}.png" for part, count in (("train", 5), ("test", 3)) for number in range(count)]
    write(tmp_path, *names)
    rows = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(names)]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
    train, evaluation = load(tmp_path)
    assert (found(train), found(evaluation)) == (
        [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4)],
        [("b", 5), ("a", 6), ("b", 7)],
    )
