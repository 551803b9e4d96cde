"""Promise: images load with the right values, and damaged files are named."""

import gzip
import io
import re
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.reading.labelled_images import load_image_splits
from accelerate_recipes.common.tasks.vision.images import load_images
from support.small_mnist import write_idx, write_mnist


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    train_set, eval_set = load_images("digits")
    assert (len(train_set), len(eval_set), train_set.image_shape, train_set.num_classes) == (1438, 359, (1, 8, 8), 10)
    digits = load_digits()
    expected = {(tuple(image.ravel().round(3)), label) for image, label in zip(digits.images / 16, digits.target)}
    batches = [dataset.__getitems__(list(range(len(dataset)))) for dataset in (train_set, eval_set)]
    images = (torch.cat([batch["image"] for batch in batches]) * 16).round().flatten(1) / 16
    labels = torch.cat([batch["label"] for batch in batches])
    assert {(tuple(image.round(3)), label) for image, label in zip(images.double().numpy(), labels.numpy())} == expected


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_idx_files(tmp_path: Path, suffix: str, place: str) -> None:
    write_mnist(tmp_path / place, suffix)
    train_set, eval_set = load_images(str(tmp_path))
    assert (len(train_set), len(eval_set), train_set.image_shape, train_set.num_classes) == (256, 50, (1, 12, 12), 4)
    batch = eval_set.__getitems__([5, 2])
    assert batch["label"].tolist() == [1, 2]
    assert batch["image"].shape == (2, 1, 12, 12) and batch["image"].dtype == torch.float32
    assert torch.equal(batch["image"][0], eval_set[5]["image"])
    assert batch["image"][:, 0, 0, 0].tolist() == pytest.approx([60 / 255, 120 / 255])


def damage(folder: Path, kind: str) -> None:
    images = folder / "train-images-idx3-ubyte"
    if kind == "truncated":
        images.write_bytes(images.read_bytes()[:1000])
    elif kind == "truncated gzip":
        images.with_suffix(".gz").write_bytes(gzip.compress(images.read_bytes())[:-20])
        images.unlink()
    elif kind == "not gzip":
        images.with_suffix(".gz").write_bytes(images.read_bytes())
        images.unlink()
    elif kind == "wrong magic":
        images.write_bytes(b"GIF8" + images.read_bytes())
    elif kind == "missing":
        (folder / "t10k-labels-idx1-ubyte").unlink()
    elif kind == "labels of another set":
        write_idx(folder / "t10k-labels-idx1-ubyte", numpy.zeros(49))
    elif kind == "one class":
        write_idx(folder / "train-labels-idx1-ubyte", numpy.full(256, 7))
    elif kind == "sizes":
        write_idx(folder / "t10k-images-idx3-ubyte", numpy.zeros((50, 8, 8)))
    elif kind == "empty":
        for path in folder.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("truncated", "train-images-idx3-ubyte has 1000 bytes, but its header says 36880: download it again"),
        ("truncated gzip", "train-images-idx3-ubyte.gz is damaged"),
        ("not gzip", "train-images-idx3-ubyte.gz is not a .gz file: remove .gz from its name, or copy it again"),
        ("wrong magic", "train-images-idx3-ubyte is not an IDX file of bytes with 3 dimensions"),
        ("missing", "t10k-labels-idx1-ubyte: no such file, and no"),
        ("labels of another set", "t10k-images has 50 images, t10k-labels 49 labels"),
        ("one class", "all labels for training are the same (7): expected different ones"),
        ("sizes", "training images are 12 x 12, test images 8 x 8: expected one size"),
        ("empty", "no data there; expected a folder with a sub-folder for each class"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, kind: str, expected: str) -> None:
    write_mnist(tmp_path / "data")
    damage(tmp_path / "data", kind)
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_images(str(tmp_path / "data"))


@pytest.mark.parametrize("shape", [(0, 12, 12), (256, 0, 12), (256, 2, 2)])
def test_idx_images_that_are_too_small(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", numpy.zeros(shape))
    write_idx(tmp_path / "train-labels-idx1-ubyte", numpy.arange(shape[0]) % 4)
    with pytest.raises(UsageError, match="train-images has no images of 4 x 4 pixels or more"):
        load_images(str(tmp_path))


def test_folder_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="--data no/such/folder: no such file or folder; use --data digits"):
        load_images("no/such/folder")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 8, 9), "the image in row 1 has 8 x 8 pixels"),
        ((3, 3, 3), "images of 3 x 3 pixels: expected 4 x 4 or more"),
        ((), "is not an image-classification dataset: expected an image and a label column, found text"),
    ],
)
def test_parquet_files_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], expected: str
) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows, features = {"text": ["a"]}, None
    if sizes:
        rows = {"image": [Image.new("L", (size, size)) for size in sizes], "label": [0, 1, 0]}
        features = Features({"image": ImageFeature(), "label": Value("int64")})
    (tmp_path / "data").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"))
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_images(str(tmp_path / "data"))


def test_parquet_files_with_the_bytes_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    images = []
    for level in range(4):
        Image.new("RGB", (5, 4), (level, 0, 0)).save(buffer := io.BytesIO(), "PNG")
        images.append(buffer.getvalue())
    table = {"image": images, "label": [0, 1, None, 1]}
    parquet.write_table(pyarrow.table(table), tmp_path / "some.parquet")
    line = "row 3 has no class in column label: fill or remove it"
    with pytest.raises(UsageError, match=line):
        load_image_splits(str(tmp_path / "some.parquet"), "")
    parquet.write_table(pyarrow.table(table | {"label": [0, 1, 1, 0]}), tmp_path / "some.parquet")
    (part,) = load_image_splits(str(tmp_path / "some.parquet"), "")
    assert [image.getpixel((0, 0)) for image in part.samples] == [(level, 0, 0) for level in range(4)]
    assert part.labels == [0, 1, 1, 0]
