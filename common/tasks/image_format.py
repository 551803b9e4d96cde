"""The input format of an image classifier, and images in that format."""

import json
import math
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from PIL import ImageOps

from ..errors import UsageError
from ..files import read_file
from .images import ImageDataset
from .reading.image_decoding import Opener
from .reading.text_files import local_path

NUM_LOOKED_AT = 1000  # training images, about
MOST_PIXELS = 2**26  # of an image


@dataclass(frozen=True)
class ImageFormat:
    """The training images, as `<output_dir>/model/config.json` describes them.

    Attributes:
        network: the recipe's name of the network.
        image_shape: (channels, height, width)
        classes: their names.
        background: "dark" or "light" if the edges of grey images are; "mixed" for all others.
    """

    network: str
    image_shape: tuple[int, int, int]
    classes: list[str]
    background: str

    @classmethod
    def of(cls, train_set: ImageDataset, network: str) -> Self:
        """The format of the images of a training set."""
        every = max(1, len(train_set) // NUM_LOOKED_AT)
        images = train_set.rows(torch.arange(0, len(train_set), every))["image"][:, 0].numpy()
        share = float((_edges(images) < 128).mean())
        kind = "mixed" if train_set.image_shape[0] > 1 or 0.05 < share < 0.95 else "dark" if share > 0.5 else "light"
        return cls(network, train_set.image_shape, train_set.classes, kind)

    def write(self, folder: Path) -> None:
        """Writes `config.json` into the folder of an exported model."""
        (folder / "config.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, output_dir: Path, networks: Container[str]) -> Self:
        """Reads what `write` wrote. Raises UsageError if there is no model, or not one of an image classifier with
        one of these networks."""
        path = output_dir / "model" / "config.json"
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # such as that of another recipe
            entries = json.loads(read_file(path))
            form = cls(**entries | {"image_shape": tuple(entries["image_shape"])})
            has_types = {*map(type, form.image_shape)} == {int} and {*map(type, form.classes)} == {str}
            is_size = len(form.image_shape) == 3 and min(form.image_shape) > 0
            if has_types and is_size and math.prod(form.image_shape) <= MOST_PIXELS and form.network in networks:
                return form
        if not any(path.parent.glob("*.safetensors")):
            raise UsageError(
                f"no model in {path.parent}: train first (the same command without --predict), or use the "
                "--output_dir of a finished run"
            )
        raise UsageError(
            f"{path} does not describe an image classifier: train again with --overwrite_output_dir, or use the "
            "--output_dir of a run of this recipe"
        )


def read_image(path: str | Path, form: ImageFormat) -> torch.Tensor:
    """An image in the shape of the training images: scaled, and cut to their proportions around the middle. Dark on
    light becomes light on dark if they are so, or the reverse.

    Returns:
        float32 of shape (channels, height, width) in [0, 1]

    Raises:
        UsageError: no image.
    """
    channels, height, width = form.image_shape
    image = Opener()(str(local_path(str(path))), str(path)).convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height))
    pixels: Any = numpy.asarray(image)
    if form.background != "mixed" and (_edges(pixels) < 128) != (form.background == "dark"):
        pixels = 255 - pixels
    return torch.from_numpy(pixels.reshape(height, width, channels) / numpy.float32(255)).permute(2, 0, 1).contiguous()


def _edges(images: numpy.ndarray) -> numpy.ndarray:
    """The median brightness along the four edges of each image of shape (..., height, width)."""
    edges = [images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]]
    return numpy.median(numpy.concatenate(edges, axis=-1), axis=-1)
