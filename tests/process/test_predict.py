"""Promise: `mnist.py --predict picture.png` classifies with the exported model."""

import re
import runpy
from pathlib import Path

import numpy
import pytest
from PIL import Image

from common import load_exported
from common.tasks.images import load_images
from common.tasks.pictures import ImageFormat, read_picture
from support.launching import fork
from support.recipes import MNIST
from support.runs import ROOT, refused


def page(digit: numpy.ndarray, generator: numpy.random.Generator) -> Image.Image:
    """A page with a dark drawing of the digit somewhere on it, in light that is uneven and with noise, as in a photo.

    `digit`: shape (height, width), light on dark in [0, 1].
    """
    drawing = Image.fromarray((255 * digit).astype(numpy.uint8)).resize((200, 200), Image.Resampling.BICUBIC)
    ink = numpy.zeros((300, 400))
    row, column = generator.integers(0, 100), generator.integers(0, 200)
    ink[row : row + 200, column : column + 200] = numpy.asarray(drawing) / 255
    light = numpy.linspace(0.9, 0.7, 400) + 0.02 * generator.standard_normal(ink.shape)
    return Image.fromarray((255 * light * (1 - 0.75 * ink)).clip(0, 255).astype(numpy.uint8))


def test_digits_on_photos(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MNIST, "--epochs 4")
    form = ImageFormat.read(run.output_dir, ["cnn"])
    model = runpy.run_path(str(ROOT / MNIST))["ConvNet"](form.image_shape, len(form.classes))
    model.load_state_dict(load_exported(run.output_dir))
    _, eval_set = load_images("digits")
    generator, right = numpy.random.default_rng(0), 0
    for index in range(100):
        page(eval_set[index]["image"][0].numpy(), generator).save(tmp_path / "photo.jpg")
        image, _ = read_picture(tmp_path / "photo.jpg", form)
        right += int(model(image[None]).argmax()) == int(eval_set[index]["label"])
    print(right)
    assert right >= 85  # 98 of them as they are

    sample = eval_set[3]
    Image.fromarray(255 - eval_set.images[3, 0].numpy()).save(tmp_path / "digit.png")
    card = (run.output_dir / "run.json").read_text()
    answer = fork(run.output_dir, "ddp", MNIST, f"--predict {tmp_path / 'digit.png'}")
    probability, label = model(sample["image"][None])[0].detach().softmax(-1).max(-1)
    assert answer.stderr == "" and answer.stdout.splitlines() == [
        f"{tmp_path / 'digit.png'}: {int(label)} with {float(probability):.1%} "
        "(grey, inverted to light on dark, 8 x 8 to 8 x 8 pixels)"
    ]
    assert (run.output_dir / "run.json").read_text() == card  # it trains nothing and records nothing


def test_names_of_classes_and_colours(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    colours = {"rose": (220, 30, 60), "leaf": (30, 200, 40)}
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list(colours))})
    for split in ("train", "test"):
        pictures = [Image.new("RGB", (10, 8), colours[name]) for name in colours] * 16
        rows = {"image": pictures, "label": [0, 1] * 16}
        (tmp_path / "data").mkdir(exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data" / f"{split}-0.parquet"))
    arguments = f"--data {tmp_path / 'data'} --model mlp --max_steps 30 --batch_size 8"
    fork(tmp_path / "run", "single", MNIST, arguments, env={"HF_HOME": str(tmp_path / "cache")})
    for name, colour in colours.items():
        Image.new("RGB", (300, 200), colour).save(tmp_path / "picture.jpg")
        run = fork(tmp_path / "run", "single", MNIST, f"--predict {tmp_path / 'picture.jpg'}")
        pattern = rf"picture\.jpg: {name} with \d\d\d?\.\d% \(colour, 300 x 200 to 10 x 8 pixels\)\n"
        assert re.search(pattern, run.stdout), run.stdout


@pytest.mark.parametrize("config", ["single", "ddp"])
def test_no_model_is_refused(tmp_path: Path, config: str) -> None:
    run = fork(tmp_path / "run", config, MNIST, "--predict digit.png", succeeds=False)
    line = f"error: no model in {tmp_path / 'run' / 'model'}: train first (the same command without --predict)"
    assert refused(run).startswith(line) and not run.output_dir.exists()
