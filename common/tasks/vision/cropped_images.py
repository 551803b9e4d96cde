"""Images of all sizes with a class each, cut and recoloured at random: drawn, in folders, or on the Hub."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset
from transformers.utils import cached_file

from ...errors import UsageError, first_line
from ..models.pretrained import silent
from ..reading.labelled import Labelled
from ..reading.labelled_images import load_image_splits
from ..reading.sources import check_not_streamed, hold_out
from .augmentation import UNCHANGED, AugmentationFlags, Box, Factors, erase, middle, mix, normalise, variation

NUM_DRAWN = 3000
SHAPES = ("circle", "cross", "ring", "square", "star", "triangle")
SETTINGS = "preprocessor_config.json"  # of transformers, with the size and colours that a model expects
ADVICE = "use --data shapes for the embedded images, or the path of a folder"


@dataclass(frozen=True)
class Preprocessing:
    """The images that a model expects: squares of `size` pixels a side, with `mean` and `std` of each colour."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, name_or_path: str) -> "Preprocessing":
        """The format of a pretrained model, from its settings. Raises UsageError if it has none."""
        try:
            try:
                content = json.loads(Path(str(cached_file(name_or_path, SETTINGS))).read_text())
            except OSError:  # a model of timm has them in its config
                found = json.loads(Path(str(cached_file(name_or_path, "config.json"))).read_text())["pretrained_cfg"]
                content = {"size": found["input_size"][-1], "image_mean": found["mean"], "image_std": found["std"]}
            size = content["crop_size"] if content.get("do_center_crop") else content["size"]
            sides = [*size.values()] if isinstance(size, dict) else [size]
            mean, std = content["image_mean"], content["image_std"]
            mean, std = (mean, std) if content.get("do_normalize", True) else ([0] * 3, [1] * 3)
            scale = round(255 * content.get("rescale_factor", 1 / 255), 6) if content.get("do_rescale", True) else 255
            if len(mean) != 3 or len(std) != 3 or 0 in std:
                raise ValueError("expected three colours")
            return cls(int(min(sides)), *(tuple(value / scale for value in each) for each in (mean, std)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            advice = f"no {SETTINGS} with size, image_mean and image_std there ({first_line(error)})"
            raise UsageError(f"--model_name_or_path {name_or_path}: {advice}") from None

    @silent()
    def write(self, folder: Path, processor: str = "ViTImageProcessor") -> None:
        """Writes the settings for transformers' pipelines into the folder of an exported model: with the middle square
        of an image; or, for the `processor` of another task, with the whole image, squeezed into a square."""
        sizes: dict[str, Any] = {"size": {"height": self.size, "width": self.size}, "do_pad": False}
        if processor == "ViTImageProcessor":
            sizes = {"size": {"shortest_edge": self.size}, "crop_size": self.size, "do_center_crop": True}
        colours = {"image_mean": self.mean, "image_std": self.std, "resample": Image.Resampling.BILINEAR}
        getattr(transformers, processor)(**sizes, **colours).save_pretrained(folder)


@dataclass(eq=False, repr=False)
class CroppedImages(Dataset):
    """Samples {"image": float32 of shape (3, size, size), normalised; "label": int, or for images with several classes
    float32 of shape (classes,), 1 for each}. A mixed image also has "other_label", and "share", the first label's
    share. With weights of classes, a sample has a "weight"."""

    source: Labelled  # the images
    form: Preprocessing  # what the model expects
    augmentation: AugmentationFlags | None = None  # how each image varies; None: its middle is used
    weights: list[float] | None = None  # of the classes

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Random numbers depend only on the seed, the epoch and the sample here: they are the same under each config.
        source, augmentation = self.source, self.augmentation
        image, label = source.samples[index], source.target(index)
        if augmentation is None:
            return {"image": resize(image, self.form, middle(*image.size)), "label": label}
        pixels, facts = self._vary(image, augmentation), {"label": label}
        if augmentation.mixup or augmentation.cutmix:
            other = int(torch.randint(len(self), ()))
            varied = self._vary(source.samples[other], augmentation)
            pixels, share = mix(pixels, varied, augmentation.mixup, augmentation.cutmix)
            facts |= {"other_label": source.target(other), "share": torch.tensor(share)}
        elif self.weights is not None:
            facts["weight"] = torch.tensor(self.weights[label])
        return {"image": pixels} | facts

    def _vary(self, image: Image.Image, augmentation: AugmentationFlags) -> Tensor:
        pixels = resize(image, self.form, *variation(*image.size, augmentation))
        return erase(pixels) if augmentation.erasing and torch.rand(()) < augmentation.erasing else pixels


def resize(
    image: Image.Image, form: Preprocessing, box: Box, is_mirrored: bool = False, colours: Factors = UNCHANGED
) -> Tensor:
    """A part of an image as a model expects it: float32 of shape (3, size, size)."""
    side, image = form.size, image if image.mode == "RGB" else image.convert("RGB")  # which copies an RGB image
    levels = numpy.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box, reducing_gap=3))
    levels = numpy.ascontiguousarray((levels[:, ::-1] if is_mirrored else levels).transpose(2, 0, 1))
    return normalise(torch.from_numpy(levels).view(3, -1).float(), form.mean, form.std, colours).view(3, side, side)


def load_labelled_images(data: str, max_samples: int | None = None) -> tuple[Labelled, Labelled]:
    """(training images, evaluation images) with their classes. If the source has only one part, one image in five is
    held out. Raises UsageError if there are no data, images or classes.

    Args:
        data: "shapes" (drawn ones), or as for `load_image_splits`.
        max_samples: read at most this many images of each part, as a stream.
    """
    if data == "shapes":
        check_not_streamed(data, max_samples)
        generator = random.Random(0)  # the same images in each run
        labels = [number % len(SHAPES) for number in range(NUM_DRAWN)]
        parts = [Labelled([_draw(SHAPES[label], generator) for label in labels], labels, list(SHAPES))]
    else:
        parts = load_image_splits(data, ADVICE, max_samples)
    if len(parts) == 1:
        parts = [parts[0].part(ids) for ids in hold_out(len(parts[0].labels), one_in=5)]
    return parts[0], parts[1]


def _draw(shape: str, generator: random.Random) -> Image.Image:
    """A shape of a random colour, size and place on an image of a random size."""
    width, height = generator.randint(40, 80), generator.randint(40, 80)
    ground, colour = ([generator.randint(*limits) for _ in range(3)] for limits in ((0, 110), (120, 255)))
    image = Image.new("RGB", (width, height), tuple(ground))
    radius = min(width, height) * generator.uniform(0.3, 0.45)
    x, y = generator.uniform(radius, width - radius), generator.uniform(radius, height - radius)
    draw, turn = ImageDraw.Draw(image), generator.uniform(-0.3, 0.3) - math.pi / 2
    if shape in ("circle", "ring"):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(colour))
        if shape == "ring":
            inner = 0.55 * radius
            draw.ellipse((x - inner, y - inner, x + inner, y + inner), fill=tuple(ground))
        return image
    # (share of the radius, part of a full turn) of the corners
    arms = [(-0.05, 1.0), (0.05, 1.0), (0.125, 0.45)]
    corners = {
        "triangle": [(1.0, number / 3) for number in range(3)],
        "square": [(1.0, number / 4 + 1 / 8) for number in range(4)],
        "star": [(0.45 if number % 2 else 1.0, number / 10) for number in range(10)],
        "cross": [(share, number / 4 + part) for number in range(4) for part, share in arms],
    }[shape]
    angles = [(radius * share, turn + 2 * math.pi * part) for share, part in corners]
    points = [(x + length * math.cos(angle), y + length * math.sin(angle)) for length, angle in angles]
    draw.polygon(points, fill=tuple(colour))
    return image
