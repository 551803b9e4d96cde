"""Promise: `--predict` shows what the exported model makes of one input."""

import json
import re
import runpy
from pathlib import Path

import numpy
import pytest
import soundfile
from PIL import Image

from accelerate_recipes import load_exported
from accelerate_recipes.common.tasks.vision.images import ImageFormat, load_images, read_image
from support.launching import fork
from support.recipes import MNIST, SPEECH, TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from support.runs import ROOT, refused


def test_digit_in_an_image(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MNIST, "--epochs 1")
    form = ImageFormat.read(run.output_dir, ["cnn"])
    model = runpy.run_path(str(ROOT / MNIST))["ConvNet"](form.image_shape, len(form.classes))
    model.load_state_dict(load_exported(run.output_dir))
    sample = load_images("digits")[1][3]["image"]
    dark = Image.fromarray((255 - 255 * sample[0]).round().byte().numpy())
    dark.resize((80, 80), Image.Resampling.NEAREST).save(tmp_path / "digit.png")
    card = (run.output_dir / "run.json").read_text()
    answer = fork(run.output_dir, "ddp", MNIST, f"--predict {tmp_path / 'digit.png'}")
    probability, label = model(read_image(tmp_path / "digit.png", form)[None])[0].detach().softmax(-1).max(-1)
    assert label == model(sample[None])[0].argmax()
    expected = f"{tmp_path / 'digit.png'}: {int(label)} with {float(probability):.1%}"
    assert answer.stderr == "" and answer.stdout.splitlines() == [expected]
    assert (run.output_dir / "run.json").read_text() == card  # it trains nothing and records nothing


def test_names_of_classes_and_colours(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    colours = {"rose": (220, 30, 60), "leaf": (30, 200, 40)}
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list(colours))})
    for split in ("train", "test"):
        images = [Image.new("RGB", (10, 8), colours[name]) for name in colours] * 16
        rows = {"image": images, "label": [0, 1] * 16}
        (tmp_path / "data").mkdir(exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data" / f"{split}-0.parquet"))
    arguments = f"--data {tmp_path / 'data'} --model mlp --max_steps 30 --batch_size 8"
    fork(tmp_path / "run", "single", MNIST, arguments, env={"HF_HOME": str(tmp_path / "cache")})
    for name, colour in colours.items():
        Image.new("RGB", (300, 200), colour).save(tmp_path / "image.jpg")
        run = fork(tmp_path / "run", "single", MNIST, f"--predict {tmp_path / 'image.jpg'}")
        pattern = rf"image\.jpg: {name} with \d\d\d?\.\d%\n"
        assert re.search(pattern, run.stdout), run.stdout


@pytest.mark.parametrize("config", ["single", "ddp"])
def test_no_model_is_refused(tmp_path: Path, config: str) -> None:
    run = fork(tmp_path / "run", config, MNIST, "--predict digit.png", succeeds=False)
    line = f"error: no model in {tmp_path / 'run' / 'model'}: train first (the same command without --predict)"
    assert refused(run).startswith(line) and not run.output_dir.exists()


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (TEXT_CLASSIFICATION, r"\w+: 0\.\d{4}"),
        pytest.param(TOKEN_CLASSIFICATION, r"[A-Z]+: .+", marks=pytest.mark.full),
    ],
)
def test_text_that_is_longer_than_the_model(tmp_path: Path, recipe: str, shape: str) -> None:
    """It is cut as in training."""
    run = fork(tmp_path / "run", "single", recipe, "--max_steps 2")
    answer = fork(run.output_dir, "single", recipe, f"--predict {'for.handler:' * 100}")
    assert all(re.fullmatch(shape, line) for line in answer.stdout.splitlines()) and answer.stdout


@pytest.mark.parametrize("target", [pytest.param("text", marks=pytest.mark.full), "class"])
def test_recording_heard_by_a_model_from_scratch(tmp_path: Path, target: str) -> None:
    """FSDP2 gives the class of the model another name; config.json has the model's own."""
    run = fork(tmp_path / "run", "fsdp2", SPEECH, f"--target {target} --max_steps 2")
    kind = {"text": "Wav2Vec2ForCTC", "class": "Wav2Vec2ForSequenceClassification"}[target]
    assert json.loads((run.output_dir / "model" / "config.json").read_text())["architectures"] == [kind]
    soundfile.write(tmp_path / "tone.wav", numpy.sin(numpy.arange(8000) / 3), 8000)
    answer = fork(run.output_dir, "single", SPEECH, f"--target {target} --predict {tmp_path / 'tone.wav'}")
    assert target == "text" or re.match(r"\d: \d+\.\d%\n", answer.stdout)
