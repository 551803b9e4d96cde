"""Promise: detection.py takes the steps of transformers' run_object_detection, has the measures of pycocotools, and
exports what a pipeline loads, with the same boxes and scores."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from support import peers
from support.boxes import FORM, SIZE, write_boxes, write_detector
from support.launching import fork
from support.recipes import RECIPES
from support.runs import Run, assert_same_result, largest_difference, refused

SCRIPT, _ = RECIPES["detection"]
NUMBERS = {7: 0, 5000: 1, 9: 2}  # {number of a category: of the model's output}


def read(folder: Path) -> list[dict[str, Any]]:
    """The images as a processor of transformers makes them, and their boxes without those of crowds."""
    coco, samples = COCO(folder / "annotations" / "instances_train2017.json"), []
    mean, std = (torch.tensor(FORM[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    for number in sorted(coco.imgs):
        with Image.open(folder / "train2017" / coco.imgs[number]["file_name"]) as image:
            width, height = image.size
            square = numpy.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        pixels = (torch.from_numpy(square.copy()).permute(2, 0, 1) / 255 - mean) / std
        found = [each for each in coco.imgToAnns[number] if not each["iscrowd"]]
        boxes = torch.tensor([each["bbox"] for each in found], dtype=torch.float32).view(-1, 4)
        boxes[:, :2] += boxes[:, 2:] / 2
        labels = torch.tensor([NUMBERS[each["category_id"]] for each in found], dtype=torch.int64)
        right = {"class_labels": labels, "boxes": boxes / torch.tensor([width, height, width, height])}
        samples.append({"pixel_values": pixels, "labels": right})
    return samples


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    pixels = torch.stack([sample["pixel_values"] for sample in samples])
    return {"pixel_values": pixels, "labels": [sample["labels"] for sample in samples]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detection")
    write_boxes(folder / "data")
    for kind in ("yolos", "detr"):
        write_detector(folder / kind, kind)
    return folder


def flags_of(folder: Path, kind: str) -> str:
    whole = "--least_area 1 --colours 0"  # images that do not vary
    return f"{peers.FLAGS} --data {folder / 'data'} --model_name_or_path {folder / kind} {whole}"


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["yolos", "detr"])
@pytest.mark.parametrize("more", ["", pytest.param("--micro_batch_size 4", marks=pytest.mark.full)])
def test_losses(tmp_path: Path, folder: Path, kind: str, more: str) -> None:
    run = fork(tmp_path / "run", "single", SCRIPT, f"{flags_of(folder, kind)} {more}")
    expected = peers.losses(write_detector(tmp_path / "model", kind), read(folder / "data"), collate)
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE


def images_of(folder: Path) -> list[tuple[int, Image.Image]]:
    """(number, image) of the held-out images."""
    coco = COCO(folder / "data" / "annotations" / "instances_val2017.json")
    return [(number, Image.open(folder / "data" / "val2017" / coco.imgs[number]["file_name"])) for number in coco.imgs]


def measures_of(folder: Path, run: Run) -> dict[str, float]:
    """Of the exported model and its processor, what pycocotools says with the file that the run read."""
    from transformers import AutoImageProcessor, AutoModelForObjectDetection

    model = AutoModelForObjectDetection.from_pretrained(run.output_dir / "model").eval()
    processor, rows = AutoImageProcessor.from_pretrained(run.output_dir / "model"), list[dict[str, Any]]()
    categories = {output: number for number, output in NUMBERS.items()}
    for number, image in images_of(folder):
        with torch.no_grad():
            outputs = model(**processor(images=[image], return_tensors="pt"))
        found = processor.post_process_object_detection(outputs, 0.0, [image.size[::-1]])[0]
        for score, label, (left, top, right, bottom) in zip(*(found[name].tolist() for name in found)):
            box = [left, top, right - left, bottom - top]
            rows.append({"image_id": number, "category_id": categories[label], "bbox": box, "score": score})
    right = COCO(folder / "data" / "annotations" / "instances_val2017.json")
    evaluation = COCOeval(right, right.loadRes(rows), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return dict(zip(("map", "map_50", "map_75"), evaluation.stats))


def test_measures_and_the_export(tmp_path: Path, folder: Path) -> None:
    from transformers import pipeline

    flags = f"{flags_of(folder, 'yolos')} --max_steps 400 --eval_every 400 --save_predictions"
    run = fork(tmp_path / "run", "single", SCRIPT, flags)
    for name, value in measures_of(folder, run).items():
        assert run.column(f"eval/{name}")[-1] == pytest.approx(value, abs=1e-6)
    assert run.column("eval/map_50")[-1] > 0.02
    detect = pipeline("object-detection", model=str(run.output_dir / "model"))
    lines = (run.output_dir / "predictions.jsonl").read_text().splitlines()
    names = detect.model.config.id2label
    for (_, image), line in zip(images_of(folder), map(json.loads, lines), strict=True):
        probabilities = torch.tensor(line["logits"]).softmax(-1)[:, :-1].max(-1)
        for found, box, score, label in zip(detect(image, threshold=0.0), line["found"], *probabilities, strict=True):
            assert found["score"] == pytest.approx(float(score), abs=1e-5)
            assert found["label"] == names[int(label)]
            across, down, width, height = (side * of for side, of in zip(box, 2 * image.size))
            edges = across - width / 2, down - height / 2, across + width / 2, down + height / 2
            assert [*found["box"].values()] == pytest.approx(edges, abs=1.001)  # whole numbers
    image = folder / "data" / "val2017" / "001.png"
    printed = fork(run.output_dir, "single", SCRIPT, f"--predict {image}").stdout.splitlines()
    assert [line.partition(":")[0] for line in printed] == [found["label"] for found in detect(Image.open(image))]
    assert Image.open(run.output_dir / "predicted.png").size == Image.open(image).size


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(config, kind, marks=pytest.mark.full)
        for config in ("ddp", "fsdp2", "deepspeed_zero3", "tensor_parallel")
        for kind in ("detr", "yolos")
    ],
)
def test_one_result_of_a_pretrained_model(tmp_path: Path, folder: Path, config: str, kind: str) -> None:
    """Its images vary, and each process sees another number of boxes."""
    varied = flags_of(folder, kind).replace("--least_area 1 --colours 0", "--least_area 0.5 --mirror")
    flags = f"{varied} --learning_rate 1e-3"
    expected, run = (fork(tmp_path / name, name, SCRIPT, flags) for name in ("single", config))
    assert_same_result(run, expected)


def test_a_head_for_other_classes_is_new(tmp_path: Path, folder: Path) -> None:
    """Also for as many classes; that of the boxes stays, though it has as many outputs, too."""
    from safetensors.torch import load_file

    for number, classes in enumerate((("car", "dog", "sky"), ("car", "dog", "sky", "sea"))):
        write_detector(tmp_path / str(number), "yolos", classes)
        flags = f"{flags_of(folder, 'yolos')} --model_name_or_path {tmp_path / str(number)} --learning_rate 1e-9"
        run = fork(tmp_path / f"run{number}", "single", SCRIPT, f"{flags} --max_steps 1")
        assert "the head is new" in run.stdout
        config = json.loads((run.output_dir / "model" / "config.json").read_text())
        assert [*config["id2label"].values()] == ["red", "green", "blue"]
        old, new = (
            load_file(path / "model.safetensors") for path in (tmp_path / str(number), run.output_dir / "model")
        )
        for name, weight in old.items():
            own = new[name.replace("encoder.mid", "encoder.interpolation.mid")]  # transformers writes an older name
            is_same = own.shape == weight.shape and torch.allclose(own, weight, atol=1e-6)
            assert is_same or name.startswith("class_labels_classifier.layers.2"), name
            assert not is_same or name != "class_labels_classifier.layers.2.weight"


def test_models_that_do_not_fit(tmp_path: Path, folder: Path) -> None:
    line = refused(fork(tmp_path / "run", "single", SCRIPT, "--predict a.png", succeeds=False))
    assert "train first (the same command without --predict)" in line
    line = refused(fork(tmp_path / "run", "single", SCRIPT, "--image_size 20 --hidden_size 30", succeeds=False))
    assert "--image_size 20 must be a multiple of 8, and --hidden_size 30 of 4" in line
    write_detector(tmp_path / "other", "conditional_detr")
    flags = f"{flags_of(folder, 'yolos')} --model_name_or_path {tmp_path / 'other'}"
    assert "use a DETR or YOLOS" in refused(fork(tmp_path / "run", "single", SCRIPT, flags, succeeds=False))
    few = fork(tmp_path / "few", "single", SCRIPT, "--num_queries 2 --max_steps 1")
    assert "an image has 4 objects, but the model finds at most 2: use --num_queries 4\n" in few.stdout


def test_a_loss_that_is_not_finite(tmp_path: Path, folder: Path) -> None:
    """The matching would raise an error of its own."""
    run = fork(tmp_path / "run", "single", SCRIPT, f"{flags_of(folder, 'yolos')} --learning_rate 1e30", succeeds=False)
    assert run.exit_code == 3


@pytest.mark.full
def test_digits(tmp_path: Path) -> None:
    assert fork(tmp_path / "run", "ddp", SCRIPT).column("eval/map")[-1] > 0.4
