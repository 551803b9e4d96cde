"""Promise: images of all sizes are classified well, and the exported model is one of transformers."""

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from accelerate_recipes.common.tasks.reading.labelled import Labelled
from accelerate_recipes.common.tasks.vision.augmentation import AugmentationFlags
from accelerate_recipes.common.tasks.vision.cropped_images import CroppedImages, Preprocessing, load_labelled_images
from support.launching import fork
from support.recipes import RECIPES
from support.runs import refused

SCRIPT, ARGUMENTS = RECIPES["image classification"]
COLOURS = {"blue": (20, 20, 200), "red": (200, 20, 20)}


def write_images(folder: Path) -> None:
    generator = random.Random(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(30):
            size = generator.randint(10, 40), generator.randint(10, 40)
            Image.new("RGB", size, colour).save(folder / name / f"{number}.png")


def write_classifier(folder: Path) -> None:
    """A small vision transformer with a head for 3 classes, and the settings of its images."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, num_labels=3, **shape)).save_pretrained(folder)
    settings = {"size": {"height": 12, "width": 12}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def test_workers_that_are_not_forks_get_the_images(tmp_path: Path) -> None:
    """They are the default on macOS, on Windows, and from Python 3.14 on."""
    write_images(tmp_path / "pictures")
    for part in load_labelled_images(str(tmp_path / "pictures")):
        cropped = CroppedImages(part, Preprocessing(12, (0.5,) * 3, (0.2,) * 3), None)
        assert torch.equal(pickle.loads(pickle.dumps(cropped))[3]["image"], cropped[3]["image"])


def keeps_the_order_of_a_head(model: Any, form: Path, tmp_path: Path) -> None:
    """The same model with its classes in another order, and one that the data lack."""
    model.classifier.weight.data, model.classifier.bias.data = (
        torch.cat([values.new_full((1, *values.shape[1:]), -9), values.flip(0)])
        for values in model.classifier.parameters()
    )
    model.config.id2label = {0: "green", 1: "red", 2: "blue"}
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}
    model.save_pretrained(tmp_path / "turned")
    shutil.copy(form / "preprocessor_config.json", tmp_path / "turned")
    flags = f"--data {tmp_path}/pictures --model_name_or_path {tmp_path}/turned --batch_size 16 --learning_rate 1e-9"
    run = fork(tmp_path / "again", "single", SCRIPT, f"{flags} --warmup_steps 0 --max_steps 1 --eval_every 1")
    assert run.column("eval/accuracy")[-1] == 1
    config = json.loads((run.output_dir / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "green", "1": "red", "2": "blue"}


@pytest.mark.parametrize("flags", ["", pytest.param("--freeze_backbone --num_workers 1", marks=pytest.mark.full)])
def test_pretrained_model_learns_a_folder_of_images(tmp_path: Path, flags: str) -> None:
    from transformers import ViTForImageClassification

    write_images(tmp_path / "pictures")
    write_classifier(tmp_path / "classifier")
    flags += f" --data {tmp_path}/pictures --model_name_or_path {tmp_path}/classifier --batch_size 16 --max_steps 30"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{flags} --learning_rate 1e-2 --warmup_steps 0 --eval_every 30")
    for name in ("accuracy", "top_5_accuracy", "balanced_accuracy"):
        assert run.column(f"eval/{name}")[-1] == 1
    model = ViTForImageClassification.from_pretrained(run.output_dir / "model").eval()
    settings = json.loads((run.output_dir / "model" / "preprocessor_config.json").read_text())
    assert settings["crop_size"] == {"height": 12, "width": 12}
    for name, colour in COLOURS.items():
        pixels = (torch.tensor(colour) / 255 - torch.tensor(settings["image_mean"])) / torch.tensor(
            settings["image_std"]
        )
        logits = model(pixel_values=pixels.view(1, 3, 1, 1).expand(1, 3, 12, 12)).logits
        assert model.config.id2label[int(logits.argmax())] == name
    if not flags.startswith("--freeze"):
        keeps_the_order_of_a_head(model, run.output_dir / "model", tmp_path)
    with Image.open(run.output_dir / "confusion.png") as image:
        assert numpy.asarray(image).std() > 0


SMALL = "--num_layers 1 --hidden_size 16 --num_heads 2 --batch_size 16 --warmup_steps 0 --image_size 16"


def test_sixteen_bits_and_several_frames_in_two_workers(tmp_path: Path) -> None:
    """As plain white, half of the images would be recognised."""
    for name, level in (("low", 10_000), ("high", 45_000)):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(40):
            pixels = numpy.full((16, 16), level + number, numpy.uint16)
            path = tmp_path / "scans" / name / f"{number}.tif"
            Image.fromarray(pixels).save(
                path, save_all=True, append_images=[Image.fromarray(pixels * 0)] * (number % 2)
            )
    flags = f"--data {tmp_path}/scans --num_workers 2 --max_steps 40 --eval_every 40"
    run = fork(tmp_path / "run", "single", SCRIPT, f"{SMALL} {flags}")
    assert run.column("eval/accuracy") == [1]
    assert run.stdout.count("has several frames: the run uses the first one") == 1
    assert "80 images for training and evaluation, 2 classes: high 40, low 40" in run.stdout


def test_class_called_train_and_files_named_after_it(tmp_path: Path) -> None:
    for name, colour in (("bus", "red"), ("car", "green"), ("train", "blue")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            file = tmp_path / "data" / name / (f"IMG_{number:02}.png" if number else f"freight-train-{name}.png")
            Image.new("RGB", (16, 16), colour).save(file)
    run = fork(tmp_path / "run", "single", SCRIPT, f"{SMALL} --data {tmp_path}/data --max_steps 2 --no_mirror")
    assert "60 images for training and evaluation, 3 classes: bus 20, car 20, train 20" in run.stdout


def test_mirroring_can_be_switched_off() -> None:
    left = Image.fromarray(numpy.repeat(numpy.array([[0] * 8 + [255] * 8], numpy.uint8), 16, axis=0))
    source = Labelled([left], [0], ["left"])
    form = Preprocessing(16, (0.0,) * 3, (1.0,) * 3)
    for mirror, kinds in ((True, {True, False}), (False, {False})):
        cropped = CroppedImages(source, form, AugmentationFlags(least_area=1.0, mirror=mirror))
        torch.manual_seed(0)
        images = [cropped[0]["image"] for _ in range(40)]
        assert {bool(image[:, :, 0].mean() > image[:, :, -1].mean()) for image in images} == kinds


@pytest.mark.full
def test_accuracy(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", SCRIPT)
    assert run.column("eval/accuracy")[-1] > 0.9


def test_mixed_and_weighted_images_have_one_result(tmp_path: Path) -> None:
    """Each random number belongs to a sample: also the partner of an image, the hole in it, and their shares."""
    write_images(tmp_path / "pictures")
    common = f"{SMALL} --data {tmp_path}/pictures --learning_rate 1e-3 --max_steps 4 --log_every 1 --erasing 0.5"
    ways = (
        ("ddp", "--mixup 0.4 --cutmix 1", "--micro_batch_size 2"),
        ("fsdp2", "--class_weights blue:3,red:0.5", "--num_workers 1"),
    )
    for config, flags, way in ways:
        alone = fork(tmp_path / f"{config}_alone", "single", SCRIPT, f"{common} {flags}")
        run = fork(tmp_path / config, config, SCRIPT, f"{common} {flags} {way}")
        assert run.column("train/loss") == pytest.approx(alone.column("train/loss"), rel=1e-5)


def test_images_with_several_classes(tmp_path: Path) -> None:
    """Lists in metadata.jsonl. The colour of each half is a class; a grey image has none."""
    from transformers import AutoConfig

    (tmp_path / "data").mkdir()
    rows = []
    for number in range(120):
        pixels = numpy.full((16, 16, 3), 128, numpy.uint8)
        names = [name for place, name in enumerate(COLOURS) if number >> place & 1]
        for name in names:
            half = slice(0, 8) if name == "blue" else slice(8, 16)
            pixels[half] = COLOURS[name]
        Image.fromarray(pixels).save(tmp_path / "data" / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "labels": names})
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"{SMALL} --data {tmp_path}/data --learning_rate 1e-2 --max_steps 60 --eval_every 60 --no_mirror"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{flags} --label_smoothing 0 --save_predictions")
    assert "2 classes: blue 60, red 60 (several of an image)" in run.stdout
    assert run.column("eval/accuracy")[-1] > 0.95 and run.column("eval/mean_average_precision")[-1] > 0.95
    assert AutoConfig.from_pretrained(run.output_dir / "model").problem_type == "multi_label_classification"
    assert not (run.output_dir / "confusion.png").exists()


def test_model_of_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from transformers import pipeline

    write_images(tmp_path / "pictures")
    model = timm.create_model("test_convnext", num_classes=2)
    timm.models.save_for_hf(model, str(tmp_path / "timm"))
    flags = f"--data {tmp_path}/pictures --model_name_or_path {tmp_path}/timm --batch_size 8 --max_steps 30"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{flags} --learning_rate 1e-3 --warmup_steps 0 --eval_every 30")
    assert run.column("eval/accuracy")[-1] == 1
    classify = pipeline("image-classification", model=str(run.output_dir / "model"))
    assert classify(str(tmp_path / "pictures" / "red" / "1.png"))[0]["label"] == "red"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--patch_size 5", "--patch_size 5 must divide --image_size 16"),
        ("--data nowhere", "--data nowhere: no such folder"),
        ("--class_weights circle", "--class_weights circle: circle is not a class with a weight"),
        ("--class_weights balanced --mixup 1", "--class_weights does not work with --mixup and --cutmix"),
        ("--data DAMAGED --num_workers 1", "blue/11.png cannot be read (not an image that Pillow knows"),
        ("--data GOOD --model_name_or_path NONE", "no image classifier there"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    for name in ("good", "damaged"):
        write_images(tmp_path / name)
    (tmp_path / "damaged" / "blue" / "11.png").write_bytes(b"no image")  # the fourth in the order of names
    for name in ("good", "damaged", "none"):
        flags = flags.replace(name.upper(), str(tmp_path / name))
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))
