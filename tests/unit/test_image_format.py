"""Promise: an image is read in the shape and on the background of the training images."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.vision.images import ImageDataset, ImageFormat, load_images, read_image


def images(value: int, shape: tuple[int, int, int] = (1, 12, 10)) -> ImageDataset:
    """20 images with this brightness at the edges, and a drawing of 6 x 4 pixels with the opposite one."""
    pixels = torch.full((20, *shape), value, dtype=torch.uint8)
    pixels[..., 3:9, 3:7] = 255 - value
    return ImageDataset(pixels, torch.arange(20) % 2, 2, ["cat", "dog"])


def read(tmp_path: Path, image: Image.Image, form: ImageFormat, **options: object) -> numpy.ndarray:
    image.save(tmp_path / "image.png", **options)
    pixels = read_image(tmp_path / "image.png", form)
    assert pixels.shape == form.image_shape and pixels.dtype == torch.float32
    return pixels.numpy()


def test_format_of_a_dataset() -> None:
    form = ImageFormat.of(images(10), "cnn")
    assert form == ImageFormat("cnn", (1, 12, 10), ["cat", "dog"], "dark")
    assert ImageFormat.of(images(240), "mlp") == ImageFormat("mlp", (1, 12, 10), ["cat", "dog"], "light")
    assert ImageFormat.of(images(10, (3, 12, 10)), "cnn").background == "mixed"
    both = ImageDataset(torch.cat([images(10).images, images(240).images]), torch.zeros(40), 1)
    assert ImageFormat.of(both, "cnn") == ImageFormat("cnn", (1, 12, 10), ["0"], "mixed")
    digits = ImageFormat.of(load_images("digits")[0], "cnn")
    assert (digits.background, digits.classes[7]) == ("dark", "7")


def test_format_is_kept_with_the_model(tmp_path: Path) -> None:
    form = ImageFormat.of(images(10), "cnn")
    form.write(tmp_path)  # a run that was done before, whose model is somewhere else now
    with pytest.raises(UsageError, match=r"no model in .*model: train first \(the same command without --predict\)"):
        ImageFormat.read(tmp_path, ["cnn"])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    other = asdict(form) | {"network": "vit"}
    for content in (None, "{", "[]", '{"architectures": ["LlamaForCausalLM"]}', json.dumps(other)):
        if content:
            (tmp_path / "model" / "config.json").write_text(content)
        with pytest.raises(UsageError, match=r"config\.json does not describe an image classifier: train again"):
            ImageFormat.read(tmp_path, ["cnn"])
    (tmp_path / "model" / "config.json").unlink()
    form.write(tmp_path / "model")
    assert ImageFormat.read(tmp_path, ["cnn"]) == form


def test_image_of_the_training_size_is_taken_as_it_is(tmp_path: Path) -> None:
    train_set, _ = load_images("digits")
    form, original = ImageFormat.of(train_set, "cnn"), train_set[5]["image"]
    pixels = train_set.images[5, 0].numpy()
    for image in (pixels, 255 - pixels):
        assert numpy.array_equal(read(tmp_path, Image.fromarray(image), form), original)


def test_transparent_and_turned_images(tmp_path: Path) -> None:
    form = ImageFormat.of(images(0), "cnn")
    drawing = numpy.zeros((120, 100, 4), numpy.uint8)  # black on nothing, as from a paint program
    drawing[30:90, 30:70, 3] = 255
    expected = images(0)[0]["image"].numpy()
    assert read(tmp_path, Image.fromarray(drawing), form) == pytest.approx(expected, abs=0.2)
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: turn the stored pixels by 90 degrees clockwise
    turned = Image.fromarray(drawing).transpose(Image.Transpose.ROTATE_90)
    assert read(tmp_path, turned, form, exif=exif) == pytest.approx(expected, abs=0.2)


def test_other_images_are_cut_to_the_shape(tmp_path: Path) -> None:
    form = ImageFormat.of(images(0, (3, 12, 10)), "cnn")
    wide = numpy.zeros((120, 300, 3), numpy.uint8)
    wide[:, 80:220] = (255, 0, 51)
    image = read(tmp_path, Image.fromarray(wide), form)
    assert image.reshape(3, -1) == pytest.approx(numpy.repeat([[1], [0], [0.2]], 120, 1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"GIF8 and no more", "cannot be read (not an image that Pillow knows: expected a file such as PNG or JPEG)"),
    ],
    ids=["missing", "no image"],
)
def test_images_that_cannot_be_used(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "image.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*{re.escape(expected)}"):
        read_image(path, ImageFormat.of(images(0), "cnn"))
