"""Promise: a picture is read in the way of the training images, and what was done with it is said."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from common.errors import UsageError
from common.tasks.images import ImageDataset, load_images
from common.tasks.pictures import ImageFormat, read_picture


def images(value: int, shape: tuple[int, int, int] = (1, 12, 10)) -> ImageDataset:
    """20 images with this brightness at the edges, and a drawing of 6 x 4 pixels with the opposite one."""
    pixels = torch.full((20, *shape), value, dtype=torch.uint8)
    pixels[..., 3:9, 3:7] = 255 - value
    return ImageDataset(pixels, torch.arange(20) % 2, 2, ["cat", "dog"])


def read(tmp_path: Path, picture: Image.Image, form: ImageFormat, **options: object) -> tuple[numpy.ndarray, str]:
    picture.save(tmp_path / "picture.png", **options)
    image, steps = read_picture(tmp_path / "picture.png", form)
    assert image.shape == form.image_shape and image.dtype == torch.float32
    return image.numpy(), steps


def grey(pixels: numpy.ndarray) -> Image.Image:
    return Image.fromarray(pixels.astype(numpy.uint8))


def test_format_of_a_dataset() -> None:
    form = ImageFormat.of(images(10), "cnn")
    assert form == ImageFormat("cnn", (1, 12, 10), ["cat", "dog"], "dark", 0.5)
    assert ImageFormat.of(images(240), "mlp") == ImageFormat("mlp", (1, 12, 10), ["cat", "dog"], "light", 0.5)
    assert ImageFormat.of(images(10, (3, 12, 10)), "cnn").background == "mixed"
    both = ImageDataset(torch.cat([images(10).images, images(240).images]), torch.zeros(40), 1)
    assert ImageFormat.of(both, "cnn") == ImageFormat("cnn", (1, 12, 10), ["0"], "mixed", 1.0)
    digits = ImageFormat.of(load_images("digits")[0], "cnn")
    assert (digits.background, digits.extent, digits.classes[7]) == ("dark", 1.0, "7")


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


def test_picture_of_the_training_size_is_taken_as_it_is(tmp_path: Path) -> None:
    train_set, _ = load_images("digits")
    form, original = ImageFormat.of(train_set, "cnn"), train_set[5]["image"]
    pixels = train_set.images[5, 0].numpy()
    image, steps = read(tmp_path, grey(pixels), form)
    assert numpy.array_equal(image, original) and steps == "grey, 8 x 8 to 8 x 8 pixels"
    image, steps = read(tmp_path, grey(255 - pixels), form)
    assert image == pytest.approx(original.numpy())
    assert steps == "grey, inverted to light on dark, 8 x 8 to 8 x 8 pixels"


def test_drawing_on_a_page_is_cut_out_scaled_and_centred(tmp_path: Path) -> None:
    form = ImageFormat.of(images(0), "cnn")
    page = numpy.full((300, 500), 230)  # grey paper
    page[40:160, 30:110] = 40
    image, steps = read(tmp_path, grey(page), form)
    expected = images(0)[0]["image"].numpy()
    assert image == pytest.approx(expected, abs=1e-6)
    assert steps == "grey, inverted to light on dark, the drawing cut out and centred, 500 x 300 to 10 x 12 pixels"
    image, steps = read(tmp_path, grey(255 - page), form)
    assert image == pytest.approx(expected, abs=1e-6) and "inverted" not in steps
    image, steps = read(tmp_path, grey(255 - page), ImageFormat.of(images(255), "cnn"))
    assert image == pytest.approx(1 - expected, abs=1e-6) and "inverted to dark on light" in steps


def test_transparent_and_turned_pictures(tmp_path: Path) -> None:
    form = ImageFormat.of(images(0), "cnn")
    drawing = numpy.zeros((300, 500, 4), numpy.uint8)  # black on nothing, as from a paint program
    drawing[40:160, 30:110, 3] = 255
    expected = images(0)[0]["image"].numpy()
    assert read(tmp_path, Image.fromarray(drawing), form)[0] == pytest.approx(expected, abs=1e-6)
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: turn the stored pixels by 90 degrees clockwise
    turned = Image.fromarray(drawing).transpose(Image.Transpose.ROTATE_90)
    assert read(tmp_path, turned, form, exif=exif)[0] == pytest.approx(expected, abs=1e-6)


def test_other_pictures_are_cut_to_the_shape(tmp_path: Path) -> None:
    form = ImageFormat.of(images(0, (3, 12, 10)), "cnn")
    wide = numpy.zeros((120, 300, 3), numpy.uint8)
    wide[:, 80:220] = (255, 0, 51)
    image, steps = read(tmp_path, Image.fromarray(wide), form)
    assert image.reshape(3, -1) == pytest.approx(numpy.repeat([[1], [0], [0.2]], 120, 1))
    assert steps == "colour, 300 x 120 to 10 x 12 pixels"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory: type the path of a picture, such as a PNG file"),
        (b"GIF8 and no more", "no image that can be read: type the path of a picture"),
        (grey(numpy.full((40, 40), 200)), "nothing is drawn on it; expected one drawing on an even background"),
        (Image.fromarray(numpy.full((40, 40), 300, numpy.uint16)), "has more than 8 bits a pixel: save it as an"),
    ],
    ids=["missing", "no image", "blank", "16 bits"],
)
def test_pictures_that_cannot_be_used(tmp_path: Path, content: bytes | Image.Image | None, expected: str) -> None:
    path = tmp_path / "picture.png"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content.save(path)
    with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*{re.escape(expected)}"):
        read_picture(path, ImageFormat.of(images(0), "cnn"))
