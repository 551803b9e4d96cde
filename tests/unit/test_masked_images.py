"""Promise: masks are read as numbers, pixel by pixel, and belong to the image of their name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.vision.augmentation import VaryingFlags
from accelerate_recipes.common.tasks.vision.cropped_images import Preprocessing
from accelerate_recipes.common.tasks.vision.masked_images import IGNORED, Masked, MaskedImages, load_masked_images

Out = pytest.CaptureFixture[str]
SIZE = 8


def write(path: Path, mask: Any, image: Any = None) -> None:
    """An image in a folder images, whose brightness is ten times the number of the class, and its mask in a folder
    masks beside it."""
    for kind, values in (("images", numpy.asarray(mask) * 10 if image is None else image), ("masks", mask)):
        file = path.parent / kind / path.name
        file.parent.mkdir(parents=True, exist_ok=True)
        (values if isinstance(values, Image.Image) else Image.fromarray(values.astype(numpy.uint8))).save(file)


def halves(left: int, right: int) -> numpy.ndarray:
    return numpy.repeat([[left] * (SIZE // 2) + [right] * (SIZE // 2)], SIZE, 0)


def load(folder: Path, ignored: int = 255, names: str | None = None) -> tuple[Masked, Masked]:
    return load_masked_images(str(folder), "image", "mask", ignored, names)


def samples(part: Masked, ignored: int = 255, flags: VaryingFlags | None = None) -> MaskedImages:
    return MaskedImages(part, [*part.classes.values()], Preprocessing(SIZE), ignored, flags)


@pytest.mark.parametrize("form", ["{split}/{name}", "{name}"])
def test_folders_in_pairs(tmp_path: Path, capfd: Out, form: str) -> None:
    """With the folders of splits above those of images and masks, or without."""
    for number in range(10):
        split = "training" if number < 7 else "validation"
        write(tmp_path / form.format(split=split, name=f"{number}.png"), halves(0, 1 + number % 3))
    (tmp_path / "images").mkdir(exist_ok=True)
    Image.new("L", (4, 4)).save(tmp_path / "images" / "alone.png")
    parts = load(tmp_path)
    assert [len(part.rows) for part in parts] == ([7, 3] if "split" in form else [8, 2])
    assert parts[0].classes == {0: "0", 1: "1", 2: "2", 3: "3"}
    for part in parts:
        for image, mask in zip(part.images, part.masks):
            assert (numpy.asarray(image) == 10 * mask).all()
    assert f"left out: 1 without image or mask, such as {'alone'}" in capfd.readouterr().out


def test_files_beside_the_images(tmp_path: Path, capfd: Out) -> None:
    """As labelme and Windows leave them."""
    for row in range(5):
        write(tmp_path / f"{row}.png", halves(0, 1))
        (tmp_path / "images" / f"{row}.json").write_text("{}")
    (tmp_path / "masks" / "Thumbs.db").write_bytes(b"1")
    (tmp_path / "names.json").write_text('\ufeff{"0": "road", "1": "car"}', encoding="utf-8")
    parts = load(tmp_path, names=str(tmp_path / "names.json"))
    assert [len(part.rows) for part in parts] == [4, 1] and parts[0].images[0].size == (SIZE, SIZE)
    assert "left out: 7 files without the name of an image" in capfd.readouterr().out


def test_a_part_without_masks_is_no_evaluation(tmp_path: Path, capfd: Out) -> None:
    for part, number in (("train", 5), ("val", 3), ("test", 2)):
        for row in range(number):
            write(tmp_path / part / f"{row}.png", halves(0, 1))
    shutil.rmtree(tmp_path / "test" / "masks")
    assert [len(part.rows) for part in load(tmp_path)] == [5, 3]
    assert "the test split has no labels: validation is read in its place" in capfd.readouterr().out


def test_folders_of_splits_below_those_of_images(tmp_path: Path) -> None:
    for split, number in (("training", 3), ("validation", 2)):
        for name in range(number):
            for kind, values in (("images", halves(5, 6)), ("annotations", halves(1, 2))):
                file = tmp_path / kind / split / f"{name}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values.astype(numpy.uint8)).save(file)
    parts = load_masked_images(str(tmp_path), "image", "annotation", 255, None)
    assert [len(part.rows) for part in parts] == [3, 2]


@pytest.mark.parametrize("mode", ["L", "P", "1", "I;16", "RGB"])
def test_numbers_of_any_file(tmp_path: Path, mode: str, capfd: Out) -> None:
    """In RGB: grey, saved as a colour."""
    numbers = halves(0, {"1": 1, "I;16": 700}.get(mode, 9))
    image = Image.fromarray(numbers.astype(numpy.uint16 if mode == "I;16" else numpy.uint8))
    if mode == "P":
        image.putpalette([*range(255, -1, -1)] * 3)
    elif mode == "1":
        image = Image.fromarray(numbers.astype(bool))
    elif mode == "RGB":
        image = image.convert("RGB")
    for name in range(5):
        write(tmp_path / f"{name}.png", image, halves(0, 1))
    train, _ = load(tmp_path)
    assert [*train.classes] == [0, numbers.max()]
    assert (train.masks[0] == numbers).all()
    said = capfd.readouterr().out
    assert f"4 images for training, 1 for evaluation; 2 classes: 0, {numbers.max()}\n" in said and "gaps" not in said
    write(tmp_path / "4.png", halves(0, 36), halves(0, 1))
    load(tmp_path)
    assert "numbers of the classes have gaps, as in masks that were scaled" in capfd.readouterr().out


def test_pixels_that_do_not_count(tmp_path: Path, capfd: Out) -> None:
    mask = halves(3, 7)
    mask[0] = 255
    for name in range(5):
        write(tmp_path / f"{name}.png", mask)
    train, _ = load(tmp_path)
    sample = samples(train)[0]
    assert sample["weight"] == SIZE * (SIZE - 1)
    expected = numpy.where(mask == 255, IGNORED, numpy.where(mask == 3, 0, 1))
    assert (sample["mask"].numpy() == expected).all()
    assert len(load(tmp_path, -1)[0].classes) == 3
    for name, both in enumerate([(3, 7), (3, 4), (4, 6), (5, 5), (7, 6)]):
        write(tmp_path / f"{name}.png", halves(*both))
    capfd.readouterr()
    assert [*load(tmp_path, 5)[0].classes] == [3, 4, 6, 7] and "gaps" not in capfd.readouterr().out


def test_names_of_classes(tmp_path: Path) -> None:
    for name in range(5):
        write(tmp_path / f"{name}.png", halves(1, 2))
    (tmp_path / "names.json").write_text(json.dumps({"2": "car", "0": "sky", "1": "road"}))
    train, _ = load(tmp_path, names=str(tmp_path / "names.json"))
    assert train.classes == {0: "sky", 1: "road", 2: "car"}
    of_model = MaskedImages(train, ["car", "dog", "sky", "road"], Preprocessing(SIZE), 255)
    assert (of_model[0]["mask"].numpy() == halves(3, 0)).all()
    (tmp_path / "names.json").write_text(json.dumps({"0": "sky", "1": "road"}))
    train, _ = load(tmp_path, names=str(tmp_path / "names.json"))
    with pytest.raises(UsageError, match=r"images/\d.png: its mask has the class 2: add it to --class_names"):
        samples(train)[0]
    (tmp_path / "names.json").write_text(json.dumps({"0": "sky", "1": "road", "2": "sky"}))
    with pytest.raises(UsageError, match=r"names.json has several classes called sky: give each its own name"):
        load(tmp_path, names=str(tmp_path / "names.json"))
    (tmp_path / "names.json").write_text(json.dumps({"0": "sky", "1": "road", "255": "sky"}))
    assert load(tmp_path, names=str(tmp_path / "names.json"))[0].classes == {0: "sky", 1: "road"}  # 255 does not count
    for wrong in ("[]", '{"1": "b", "01": "c"}', '{"1": "b", "1": "c"}', '{"0": null, "1": "b"}'):
        (tmp_path / "names.json").write_text(wrong)
        with pytest.raises(UsageError, match="expected a JSON file such as"):
            load(tmp_path, names=str(tmp_path / "names.json"))


def test_image_and_mask_vary_together(tmp_path: Path) -> None:
    numbers = numpy.random.default_rng(0).permutation(16).reshape(4, 4).repeat(16, 0).repeat(16, 1)
    for name in range(5):
        write(tmp_path / f"{name}.png", numbers)
    train, _ = load(tmp_path)
    form, flags = Preprocessing(64, (0,) * 3, (1,) * 3), VaryingFlags(least_area=0.3, colours=0.0)
    varied = MaskedImages(train, [*train.classes.values()], form, 255, flags)
    seen = set()
    for _ in range(20):
        sample = varied[0]
        close = (sample["image"][0] * 25.5 - sample["mask"]).abs() < 0.5  # but for borders, where colours mix
        assert close.float().mean() > 0.75
        seen.add(tuple(sample["mask"].flatten().tolist()))
    assert len(seen) == 20
    whole = MaskedImages(
        train, [*train.classes.values()], form, 255, VaryingFlags(least_area=1.0, mirror=False, colours=0.0)
    )
    assert (whole[0]["mask"].numpy() == numbers).all()


@pytest.mark.parametrize("column", ["mask", "annotation"])
def test_parquet(tmp_path: Path, column: str) -> None:
    import datasets

    masks = [halves(0, 1 + number % 2).astype(numpy.uint8) for number in range(10)]
    columns = {"image": [Image.fromarray(10 * mask) for mask in masks], column: [*map(Image.fromarray, masks)]}
    kinds = datasets.Features({name: datasets.Image() for name in columns})
    datasets.Dataset.from_dict(columns, features=kinds).to_parquet(tmp_path / "train.parquet")
    if column != "mask":
        with pytest.raises(UsageError, match="has no column mask: use --mask_column with one of image, annotation"):
            load(tmp_path)
    parts = load_masked_images(str(tmp_path / "train.parquet"), "image", column, 255, None)
    assert [len(part.rows) for part in parts] == [8, 2]
    for image, mask in zip(parts[1].images, parts[1].masks):
        assert (numpy.asarray(image) == 10 * mask).all()


def test_wrong_masks(tmp_path: Path) -> None:
    def refused(mask: Any, line: str, ending: str = "png", image: Any = None) -> None:
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
        for name in range(5):
            write(folder / f"{name}.{ending}", mask, image)
        with pytest.raises(UsageError, match=line):
            samples(load(folder)[0])[0]

    refused(halves(0, 255), "the masks have 1 classes besides --ignored_class 255: expected two or more")
    refused(
        Image.new("RGB", (SIZE, SIZE), (1, 2, 3)), r"0.png is in mode RGB: expected a PNG in grey", image=halves(1, 2)
    )
    refused(halves(0, 9), r"0.jpg is a JPEG file, which changes numbers: expected a PNG", "jpg")
    refused(halves(0, 9), r"0.webp is a WEBP file, which changes numbers: expected a PNG", "webp")
    refused(halves(1, 2), r"/\d.png and its mask have 3 x 2 and 8 x 8 pixels", image=numpy.zeros((2, 3)))
    (tmp_path / "empty" / "masks").mkdir(parents=True)
    write(tmp_path / "other" / "a.png", halves(1, 2))
    (tmp_path / "other" / "masks" / "a.png").rename(tmp_path / "other" / "masks" / "b.png")
    with pytest.raises(UsageError, match=r"no image in the folder image\(s\) has a mask of its name in mask\(s\)"):
        load(tmp_path / "other")


def test_two_images_of_one_mask(tmp_path: Path) -> None:
    for name in range(5):
        write(tmp_path / f"{name}.png", halves(1, 2))
    Image.new("L", (SIZE, SIZE)).save(tmp_path / "images" / "3.jpg")
    with pytest.raises(UsageError, match=r"images/3.(png|jpg) are called 3, up to the ending: remove one"):
        load(tmp_path)


def test_a_table_names_files_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a class that only the evaluation has is said."""
    for split, pair in {"train": (1, 2), "test": (1, 3)}.items():
        for name in range(3):
            write(tmp_path / "files" / split / f"{name}.png", halves(*pair))
        rows = [{kind: f"../files/{split}/{kind}s/{name}.png" for kind in ("image", "mask")} for name in range(3)]
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = load(tmp_path / "set")
    assert parts[0].classes == {1: "1", 2: "2", 3: "3"}
    assert [len(samples(part)) for part in parts] == [3, 3]
    assert "the evaluation has classes that no training mask has: 3" in capsys.readouterr().out
    (tmp_path / "files" / "train" / "masks" / "1.png").unlink()
    with pytest.raises(UsageError, match=r"row 2 names \.\./files/train/masks/1.png: no such file in .*set"):
        load(tmp_path / "set")
