"""What an image classifier must know beside its weights, and pictures read in the way of its training images."""

import json
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy
import torch
from PIL import Image, ImageOps

from ..errors import UsageError
from .images import Images

NUM_LOOKED_AT = 1000  # training images, about
SHARE_OF_ONE_KIND = 0.95  # of the training images must have a dark edge, or a light one, to call the set so
LARGEST = 256  # pixels; a larger picture is reduced first: single specks must not count as drawing
LEAST_CONTRAST = 0.1


@dataclass(frozen=True)
class ImageFormat:
    """The training images, as `<output_dir>/model/config.json` describes them.

    Attributes:
        network: the recipe's name of the network.
        image_shape: (channels, height, width)
        classes: their names.
        background: "dark" or "light" for grey images with an even background; "mixed" for all others.
        extent: the part of the image's height or width that a drawing on an even background takes, the median.
    """

    network: str
    image_shape: tuple[int, int, int]
    classes: list[str]
    background: str
    extent: float

    @classmethod
    def of(cls, train_set: Images, network: str) -> Self:
        """The format of the images of a training set."""
        every = max(1, len(train_set) // NUM_LOOKED_AT)
        looked_at = train_set.rows(torch.arange(0, len(train_set), every))
        images = looked_at["image"][:, 0].numpy() / numpy.float32(255)
        dark = float((_edges(images) < 0.5).mean())
        is_even = train_set.image_shape[0] == 1 and max(dark, 1 - dark) >= SHARE_OF_ONE_KIND
        background = "mixed" if not is_even else "dark" if dark > 0.5 else "light"
        drawings = images if background == "dark" else 1 - images
        extent = float(numpy.median([_extent(image) for image in drawings])) if is_even else 1.0
        return cls(network, train_set.image_shape, train_set.classes, background, extent)

    def write(self, folder: Path) -> None:
        """Writes `config.json` into the folder of an exported model."""
        (folder / "config.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, output_dir: Path, networks: Container[str]) -> Self:
        """What `write` wrote. Raises UsageError if there is no model, or not one of an image classifier with one of
        these networks."""
        path = output_dir / "model" / "config.json"
        with suppress(OSError, ValueError, TypeError, KeyError):  # such as the config.json of another recipe
            entries = json.loads(path.read_text())
            form = cls(**entries | {"image_shape": tuple(entries["image_shape"])})
            if form.network in networks:
                return form
        if not any(path.parent.glob("*.safetensors")):
            raise UsageError(
                f"no model in {path.parent}: train first (the same command without --predict), or type the "
                "--output_dir of a finished run"
            )
        raise UsageError(
            f"{path} does not describe an image classifier: train again with --overwrite_output_dir, or type the "
            "--output_dir of a run of this recipe"
        )


def read_picture(path: str | Path, form: ImageFormat) -> tuple[torch.Tensor, str]:
    """Reads a picture in the way of the training images.

    A picture of their size is taken as it is, except that dark on light becomes light on dark if they are so, or the
    reverse. In any other picture for grey images on an even background, the drawing is cut out, scaled to the size of
    the training images' drawings and centred. All other pictures are cut to the training images' shape.

    Args:
        path: an image file, such as a PNG or a photo.
        form: of the exported model.

    Returns:
        (float32 of shape (channels, height, width) in [0, 1], what was done with the picture)

    Raises:
        UsageError: no picture, or nothing on it.
    """
    channels, height, width = form.image_shape
    picture = _open(path).convert("L" if channels == 1 else "RGB")
    steps = ["grey" if channels == 1 else "colour"]
    if form.background == "mixed":
        pixels = _pixels(picture if picture.size == (width, height) else ImageOps.fit(picture, (width, height)))
    else:
        whole = _pixels(picture)
        contrary = (_edges(whole) > 0.5) == (form.background == "dark")
        if contrary:
            steps.append("inverted to light on dark" if form.background == "dark" else "inverted to dark on light")
            whole = 1 - whole
        pixels = whole
        if picture.size != (width, height):
            steps.append("the drawing cut out and centred")
            drawing = _drawing(path, whole if form.background == "dark" else 1 - whole, form)
            pixels = drawing if form.background == "dark" else 1 - drawing
    steps.append(f"{picture.width} x {picture.height} to {width} x {height} pixels")
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1).contiguous(), ", ".join(steps)


def _open(path: str | Path) -> Image.Image:
    """The picture the right way up, without transparency. Raises UsageError."""
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or "no image that can be read"
        raise UsageError(f"{path}: {reason}: type the path of a picture, such as a PNG file") from None
    if picture.mode.startswith(("I", "F")):  # Pillow would cut off all values above 255
        raise UsageError(f"{path} has more than 8 bits a pixel: save it as an ordinary PNG or JPEG file")
    if picture.has_transparency_data:
        paper = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(paper, picture.convert("RGBA"))
    return picture


def _pixels(picture: Image.Image) -> numpy.ndarray:
    return numpy.asarray(picture, dtype=numpy.float32) / 255


def _edges(images: numpy.ndarray) -> numpy.ndarray:
    """The median brightness along the four edges of each image of shape (..., height, width)."""
    edges = [images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]]
    return numpy.median(numpy.concatenate(edges, axis=-1), axis=-1)


def _box(image: numpy.ndarray) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of what is brighter than half of the brightest pixel, ends excluded."""
    bright = image > image.max() / 2
    (rows,), (columns,) = bright.any(1).nonzero(), bright.any(0).nonzero()
    return (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1) if len(rows) else (0, len(image), 0, image.shape[1])


def _extent(image: numpy.ndarray) -> float:
    """The larger part of the height or the width that the drawing takes, light on dark."""
    top, bottom, left, right = _box(image)
    return max((bottom - top) / image.shape[0], (right - left) / image.shape[1])


def _drawing(path: str | Path, image: numpy.ndarray, form: ImageFormat) -> numpy.ndarray:
    """The drawing of a picture, light on dark, at the size of those of the training images. Raises UsageError."""
    _, height, width = form.image_shape
    reduced = Image.fromarray(image)
    reduced.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    image = numpy.asarray(reduced)
    background = _edges(image)
    contrast = image.max() - background
    if contrast < LEAST_CONTRAST:
        raise UsageError(f"{path}: nothing is drawn on it; expected one drawing on an even background")
    image = ((image - background) / contrast).clip(0, 1)
    top, bottom, left, right = _box(image)
    scale = form.extent * min(height / (bottom - top), width / (right - left))
    size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
    small = numpy.asarray(Image.fromarray(image[top:bottom, left:right]).resize(size, Image.Resampling.BOX))
    canvas = numpy.zeros((height, width), numpy.float32)
    row, column = _start(small.sum(1), height), _start(small.sum(0), width)
    canvas[row : row + size[1], column : column + size[0]] = small
    return canvas / canvas.max()


def _start(brightness: numpy.ndarray, length: int) -> int:
    """Where a drawing starts whose centre of mass is in the middle, as in MNIST. Of 300 MNIST digits in larger
    pictures, 99 % are recognised; 96 % with the centre of the drawing's box in the middle."""
    centre = (numpy.arange(len(brightness)) * brightness).sum() / brightness.sum()
    return int(min(max(round((length - 1) / 2 - centre), 0), length - len(brightness)))
