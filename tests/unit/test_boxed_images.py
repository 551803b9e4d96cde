"""Promise: boxes are read as they stand in the data, follow their image, and are measured as pycocotools does."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.metrics.box_metrics import make_box_measure
from accelerate_recipes.common.tasks.vision.augmentation import VaryingFlags
from accelerate_recipes.common.tasks.vision.boxed_images import Boxed, BoxedImages, load_boxed_images
from accelerate_recipes.common.tasks.vision.cropped_images import Preprocessing

Out = pytest.CaptureFixture[str]
WIDTH, HEIGHT = 40, 20
PLAIN = Preprocessing(40, (0,) * 3, (1,) * 3)
CATS = [{"id": 7, "name": "cat"}, {"id": 5000, "name": "dog"}]
FOUND = [{"bbox": [4, 5, 20, 10], "category_id": 7}, {"bbox": [0, 0, 40, 20], "category_id": 5000, "iscrowd": 1}]
OBJECTS = [("cat", [4, 5, 20, 10], False), ("dog", [0, 0, 40, 20], True)]


def image(path: Path, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (WIDTH, HEIGHT)).save(path)


def coco(number: int, found: list[dict[str, Any]], name: str = "{}.png") -> dict[str, Any]:
    """COCO's JSON of so many images, of which each has these objects but for the last, which has none."""
    images = [{"id": 10 * row, "file_name": name.format(row)} for row in range(number)]
    annotations = [each | {"image_id": 10 * row} for row in range(number - 1) for each in found]
    return {"images": images, "annotations": annotations, "categories": CATS}


def write(folder: Path, number: int = 5, found: Any = FOUND, table: str = "boxes.json", images: str = ".") -> Path:
    for row in range(number):
        image(folder / images / f"{row}.png")
    (folder / table).parent.mkdir(parents=True, exist_ok=True)
    (folder / table).write_text(json.dumps(coco(number, found)))
    return folder


def load(path: Path) -> tuple[Boxed, Boxed]:
    return load_boxed_images(str(path), "image", "objects")


def samples(part: Boxed, flags: VaryingFlags | None = None, form: Preprocessing = PLAIN) -> BoxedImages:
    return BoxedImages(part, part.classes, form, 2, flags)


def test_a_sample(tmp_path: Path) -> None:
    """Also without objects."""
    parts = load(write(tmp_path))
    assert [len(part.rows) for part in parts] == [4, 1]
    assert parts[0].classes == ["cat", "dog"]
    rows = {row: sample for part in parts for row, sample in zip(part.rows, samples(part))}
    for row in range(4):
        assert parts[0].objects[row] == OBJECTS
        assert rows[row]["boxes"].flatten().tolist() == pytest.approx([14 / 40, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1])
        assert rows[row]["label"].tolist() == [0, 1]
        assert rows[row]["is_crowd"].tolist() == [False, True]
        assert rows[row]["size"].tolist() == [WIDTH, HEIGHT]
        assert rows[row]["image"].shape == (3, 40, 40)
    assert rows[4]["label"].tolist() == [-1, -1]
    with pytest.raises(UsageError, match="boxes"):
        load(write(tmp_path / "none", found=[]))


@pytest.mark.parametrize(
    ("tables", "images"),
    [
        (("train.json", "test.json"), ("images", "images")),
        (("annotations/instances_train2017.json", "annotations/instances_val2017.json"), ("train2017", "val2017")),
        (("train/_annotations.coco.json", "valid/_annotations.coco.json"), ("train", "valid")),
        (("training/metadata.jsonl", "testing/metadata.jsonl"), ("training", "testing")),
    ],
)
def test_forms_of_folders(tmp_path: Path, capfd: Out, tables: tuple[str, str], images: tuple[str, str]) -> None:
    for table, number, place in zip(tables, (5, 3), images):
        write(tmp_path, number, table=table, images=place)
        if table.endswith(".jsonl"):
            cell = {"bbox": [each["bbox"] for each in FOUND], "categories": ["cat", "dog"], "iscrowd": [0, 1]}
            rows = [{"file_name": f"{row}.png", "objects": cell if row < number - 1 else None} for row in range(number)]
            (tmp_path / table).write_text("\n".join(map(json.dumps, rows)))
    image(tmp_path / images[0] / "alone.png")
    parts = load(tmp_path)
    assert [len(part.rows) for part in parts] == [5, 3]
    for part, place in zip(parts, images):
        assert part.objects == (len(part.rows) - 1) * [OBJECTS] + [[]]
        assert Path(part.images.name(1)) == tmp_path / place / "1.png"
    printed = capfd.readouterr().out
    assert "left out: 1 files that no table names, such as alone.png" in printed
    assert "5 images for training, 3 for evaluation; 12 boxes of 2 classes: cat, dog" in printed
    if tables[0].endswith("2017.json"):
        assert [len(part.rows) for part in load(tmp_path / tables[0])] == [4, 1]


@pytest.mark.parametrize("form", ["lists", "objects", "names"])
def test_parquet(tmp_path: Path, form: str) -> None:
    import datasets

    label = datasets.Value("string") if form == "names" else datasets.ClassLabel(names=["dog", "cat", "cow"])
    box = datasets.List(datasets.Value("float32"), length=4)
    kind: Any = {"bbox": box, "category": label, "iscrowd": datasets.Value("bool")}
    objects: Any = [{"bbox": each[1], "category": each[0], "iscrowd": each[2]} for each in OBJECTS]
    if form == "lists":
        kind = {name: datasets.List(each) for name, each in kind.items()}
        objects = {name: [each[name] for each in objects] for name in kind}
    pixels = Image.new("CMYK", (WIDTH, HEIGHT))
    features = datasets.Features(
        {"picture": datasets.Image(), "found": kind if form == "lists" else datasets.List(kind)}
    )
    columns = {"picture": 5 * [pixels.convert("RGB")], "found": 5 * [objects]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match="has no column image: use --image_column with one of picture, found"):
        load(tmp_path / "train.parquet")
    train, evaluation = load_boxed_images(str(tmp_path / "train.parquet"), "picture", "found")
    assert [len(train.rows), len(evaluation.rows)] == [4, 1]
    assert train.classes == (["cat", "dog"] if form == "names" else ["dog", "cat", "cow"])
    assert train.objects == 5 * [OBJECTS]
    assert samples(train)[0]["image"].shape == (3, 40, 40)


def test_one_file_of_coco_is_all_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name says; and from inside its folder."""
    write(tmp_path, 10, table="annotations/instances_val2017.json", images="val2017")
    monkeypatch.chdir(tmp_path / "annotations")
    assert [len(part.rows) for part in load(Path("instances_val2017.json"))] == [8, 2]


def test_a_part_without_boxes_is_no_evaluation(tmp_path: Path, capfd: Out) -> None:
    """As the test part of COCO."""
    for part, number in (("train", 5), ("valid", 3), ("test", 2)):
        write(tmp_path / part, number, [] if part == "test" else FOUND)
    assert [len(part.rows) for part in load(tmp_path)] == [5, 3]
    assert "the test split has no labels: validation is read in its place" in capfd.readouterr().out


def test_boxes_follow_their_image(tmp_path: Path) -> None:
    pixels = numpy.zeros((HEIGHT, WIDTH, 3), numpy.uint8)
    pixels[5:15, 4:24] = 255
    write(tmp_path, found=FOUND[:1])
    for row in range(5):
        Image.fromarray(pixels).save(tmp_path / f"{row}.png")
    train, _ = load(tmp_path)
    row = next(number for number, own in enumerate(train.rows) if own < 4)
    varied, seen = (
        samples(train, VaryingFlags(least_area=0.3, colours=0.0), Preprocessing(64, (0,) * 3, (1,) * 3)),
        set(),
    )
    for _ in range(40):
        sample = varied[row]
        if sample["label"][0] < 0:  # cut off
            continue
        across, down, width, height = (64 * sample["boxes"][0]).tolist()
        rows, columns = (sample["image"][0] > 0.5).nonzero(as_tuple=True)
        edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        box = [across - width / 2, down - height / 2, across + width / 2, down + height / 2]
        assert [*map(float, edges)] == pytest.approx(box, abs=1.5)
        seen.add(tuple(box))
    assert len(seen) > 10


def test_boxes_at_the_edge_and_without_size(tmp_path: Path, capfd: Out) -> None:
    found = [{"bbox": [-4, 10, 14, 30], "category_id": 7}, {"bbox": [3, 3, 0, 5], "category_id": 7}]
    found.append({"bbox": [9, 3, -2, 5], "category_id": 5000})
    train, _ = load(write(tmp_path, found=found))
    assert "left out: 8 of 12 boxes, without width or height" in capfd.readouterr().out
    row = next(number for number, own in enumerate(train.rows) if own < 4)
    assert samples(train)[row]["boxes"][0].tolist() == pytest.approx([5 / 40, 15 / 20, 10 / 40, 10 / 20])


@pytest.mark.parametrize("mode", ["L", "P", "1", "I;16", "RGBA", "CMYK"])
def test_images_of_all_kinds(tmp_path: Path, mode: str) -> None:
    write(tmp_path)
    for row in range(5):
        picture = Image.new("RGB" if mode == "CMYK" else mode, (WIDTH, HEIGHT), 0)
        picture.save(tmp_path / f"{row}.png")
        if mode == "CMYK":
            Image.new("CMYK", (WIDTH, HEIGHT)).save(tmp_path / f"{row}.png", format="JPEG")
    assert samples(load(tmp_path)[0])[0]["image"].shape == (3, 40, 40)


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a missing image": (
        lambda it: it["images"][2].update(file_name="x.png"),
        "no image x.png next to the table, in images or in",
    ),
    "strings": (lambda it: it["annotations"][1].update(bbox=["1", "2", "3", "4"]), "0.png: an object is .*'1', '2'"),
    "a string": (lambda it: it["annotations"][1].update(bbox="1234"), "expected a bbox of left, top, width and height"),
    "three numbers": (lambda it: it["annotations"][1].update(bbox=[1, 2, 3]), "expected a bbox of left, top, width"),
    "no number": (lambda it: it["annotations"][1].update(bbox=[1, 2, 3, float("nan")]), "expected a bbox of left"),
    "no box": (lambda it: it["annotations"][1].pop("bbox"), "expected a bbox of left, top, width and height"),
    "no class": (lambda it: it["annotations"][1].pop("category_id"), "a known category"),
    "an unknown class": (lambda it: it["annotations"][1].update(category_id=8), "a known category"),
    "a crowd of two": (lambda it: it["annotations"][1].update(iscrowd=2), "perhaps an iscrowd of 0 or 1"),
    "a crowd by a word": (lambda it: it["annotations"][1].update(iscrowd="no"), "perhaps an iscrowd of 0 or 1"),
    "only crowds": (
        lambda it: [each.update(iscrowd=1) for each in it["annotations"]],
        "for training have only boxes of crowds .iscrowd., which are not trained; use --data digits",
    ),
    "another size": (
        lambda it: it["images"][0].update(width=80, height=40.0),
        "0.png has 40 x 20 pixels, but its table says 80 x 40: scale the boxes, or use an image of that size",
    ),
    "a size without numbers": (lambda it: it["images"][0].update(width="wide"), "is not COCO's JSON .could not"),
    "an unknown image": (lambda it: it["annotations"][1].update(image_id=8), "is not COCO's JSON .8 is missing"),
    "images without names": (lambda it: it["images"][1].pop("file_name"), "is not COCO's JSON .'file_name' is missing"),
    "an image twice": (lambda it: it["images"][1].update(id=0), "is not COCO's JSON .an id or a category"),
    "a file twice": (
        lambda it: it["images"][1].update(file_name="0.png"),
        "names .*0.png twice: put its boxes into one",
    ),
    "no name": (lambda it: it["categories"][1].update(name=None), "COCO's JSON .an id .*, or a category has no name"),
    "a class twice": (lambda it: it["categories"][1].update(id=CATS[0]["id"]), "COCO's JSON .an id or a category"),
    "a class's name twice": (lambda it: it["categories"][1].update(name=CATS[0]["name"]), "a category's name occurs"),
    "no classes": (lambda it: it.update(categories=3), "is not COCO's JSON"),
    "outside": (
        lambda it: it["annotations"][0].update(bbox=[50, 0, 3, 4]),
        "0.png has 40 x 20 pixels, but a box is outside",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_annotations(tmp_path: Path, what: str) -> None:
    write(tmp_path)
    content, (spoil, line) = deepcopy(coco(5, FOUND)), BAD[what]
    spoil(content)
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=line) as raised:
        for part in load(tmp_path):
            [*samples(part)]
    assert "\n" not in str(raised.value)


def test_sizes_and_crowds_in_each_form(tmp_path: Path) -> None:
    """Sizes that are right, or not given; and false is no crowd, also as a text."""
    content, sizes = coco(5, FOUND[:1]), ({"width": WIDTH, "height": HEIGHT}, {"width": "40"}, {"height": None})
    for row, (size, crowd) in enumerate(zip((*sizes, {"width": 0, "height": 0}), ("0", False, None, 0.0))):
        content["images"][row] |= size
        content["annotations"][row]["iscrowd"] = crowd
    (write(tmp_path) / "boxes.json").write_text(json.dumps(content))
    parts = load(tmp_path)
    assert sum(len([*samples(part)]) for part in parts) == 5
    assert not any(is_crowd for part in parts for found in part.objects for *_, is_crowd in found)
    for crowd in ("1", 1.0, True):
        content["annotations"][0]["iscrowd"] = crowd
        (tmp_path / "boxes.json").write_text(json.dumps(content))
        assert load(tmp_path)[0].objects[0] == [("cat", [4, 5, 20, 10], True)]


def test_the_size_of_an_image_before_its_turn(tmp_path: Path) -> None:
    content, tags = coco(5, FOUND[:1], "{}.jpg"), Image.Exif()
    tags[274] = 6
    for row, each in enumerate(content["images"]):
        each |= {"width": WIDTH, "height": HEIGHT}
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / f"{row}.jpg", exif=tags)
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    line = "jpg has 20 x 40 pixels, but its table says 40 x 20: its orientation tag turns it: swap these numbers if"
    with pytest.raises(UsageError, match=line):
        samples(load(tmp_path)[0])[0]


def test_boxes_as_shares_of_the_image_are_refused(tmp_path: Path) -> None:
    found = [{"bbox": [0.1, 0.25, 0.5, 0.5], "category_id": 7}, {"bbox": [0, 0, 1, 1], "category_id": 5000}]
    with pytest.raises(UsageError, match="no box has a number above 1: expected pixels, not fractions"):
        load(write(tmp_path, found=found))


def test_objects_as_lists_of_different_lengths(tmp_path: Path) -> None:
    """Only the lists that are read must have the same length."""
    write(tmp_path)
    (tmp_path / "boxes.json").unlink()
    box, none = [2, 2, 9, 9], {"bbox": [], "category": [], "area": []}
    found = [{"bbox": [box, box], "category": ["a", "b"], "area": []}] * 4 + [none]
    wrong = '{"bbox": [[2, 2, 9, 9]], "category": ["a", "b"]}', '{"boxes": [[2, 2, 9, 9]], "labels": ["a"]}', '"[2, 2]"'
    for train in ("", *wrong):
        rows = [{"file_name": f"{row}.png", "objects": each} for row, each in enumerate(found)]
        rows[0]["objects"] = json.loads(train) if train else rows[0]["objects"]
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if not train:
            assert sorted(map(len, (each for part in load(tmp_path)[:1] for each in part.objects))) == [0, 2, 2, 2, 2]
        else:
            with pytest.raises(UsageError, match=r"0\.png: an object is .{6,}: expected a bbox of left"):
                load(tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "objects": "{}"}')
    with pytest.raises(UsageError, match=r"0\.png: an object is '{}': expected a bbox of left"):  # in quotes: a text
        load(tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"image": "0.png", "objects": []}')
    with pytest.raises(UsageError, match=r"metadata.jsonl has no column file_name: name the file of each image there"):
        load(tmp_path)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "x.png", "objects": found[0]}))
    with pytest.raises(UsageError, match=r"no image x.png next to the table, in images or in"):
        load(tmp_path)


def test_wrong_folders(tmp_path: Path) -> None:
    for text in ('{"images": [', "[" * 100_000):
        write(tmp_path / "broken")
        (tmp_path / "broken" / "boxes.json").write_text(text)
        with pytest.raises(UsageError, match=r"boxes.json is not COCO's JSON"):
            load(tmp_path / "broken")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no .csv"):
        load(tmp_path / "empty")
    write(tmp_path / "both")
    write(tmp_path / "both", table="more.json")
    with pytest.raises(UsageError, match="both have boxes for train: use the path of one"):
        load(tmp_path / "both")
    write(tmp_path / "val", table="val.json")
    with pytest.raises(UsageError, match="expected a train split, found validation"):
        load(tmp_path / "val")
    write(tmp_path / "no")
    (tmp_path / "no" / "boxes.json").unlink()
    (tmp_path / "no" / "metadata.jsonl").write_text('{"file_name": "0.png", "things": []}')
    with pytest.raises(UsageError, match="has no column objects: use --objects_column with one of file_name, things"):
        load(tmp_path / "no")


def test_measures_are_those_of_pycocotools(tmp_path: Path) -> None:
    """With crowds, images without objects, classes that nothing has, and boxes that are wrong by some pixels."""
    generator = numpy.random.default_rng(0)
    truth, found, boxes = list[dict[str, Any]](), list[dict[str, Any]](), 4
    right = {"boxes": torch.zeros(30, boxes, 4), "label": torch.full((30, boxes), -1)}
    own = {"boxes": torch.zeros(30, 6, 4), "label": torch.zeros(30, 6, dtype=torch.int64), "score": torch.zeros(30, 6)}
    is_crowd = torch.zeros(30, boxes, dtype=torch.bool)
    for number in range(30):
        for place in range(6):
            box = numpy.array([*generator.integers(0, 60, 2), *generator.integers(10, 40, 2)], dtype=float)
            label, is_real = int(generator.integers(3)), place < number % 5
            if is_real:
                right["boxes"][number, place], right["label"][number, place] = torch.tensor(box), label
                is_crowd[number, place] = bool(generator.random() < 0.2)
                truth.append({"image_id": number, "category_id": label, "bbox": box.tolist(), "id": len(truth) + 1})
                truth[-1] |= {"area": box[2] * box[3], "iscrowd": int(is_crowd[number, place])}
            box[:2] += generator.normal(0, 3, 2)
            label, score = (label if generator.random() < 0.8 else 4), float(numpy.float32(generator.random()))
            own["boxes"][number, place], own["label"][number, place] = torch.tensor(box), label
            own["score"][number, place] = score
            box = own["boxes"][number, place].double().numpy()
            found.append({"image_id": number, "category_id": label, "bbox": box.tolist(), "score": score})
    classes = [{"id": number, "name": str(number)} for number in range(6)]
    images = [{"id": number} for number in range(30)]
    content = {"images": images, "annotations": truth, "categories": classes, "info": {}}
    (tmp_path / "truth.json").write_text(json.dumps(content))
    reference = COCO(tmp_path / "truth.json")
    evaluation = COCOeval(reference, reference.loadRes(found), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    measure = make_box_measure()
    ours = measure(*own.values(), *right.values(), is_crowd)
    assert [*ours.values()] == pytest.approx(evaluation.stats[:3].tolist(), abs=1e-9)
    assert 0.1 < ours["map"] < ours["map_50"] < 0.9
    none = torch.full_like(right["label"], -1)
    assert measure(*own.values(), right["boxes"], none, is_crowd) == {"map": -1.0, "map_50": -1.0, "map_75": -1.0}
