"""Images of all sizes with a class each, cut and recoloured at random: drawn, in folders, or on the Hub."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

from ...config import RunConfig, flag
from ...errors import UsageError, first_line
from ..reading.labelled import Labelled
from ..reading.labelled_images import load_image_splits
from ..reading.sources import check_not_streamed, hold_out

NUM_DRAWN = 3000
SHAPES = ("circle", "cross", "ring", "square", "star", "triangle")
SETTINGS = "preprocessor_config.json"  # of transformers, with the size and colours that a model expects
ADVICE = "use --data shapes for the embedded images, or the path of a folder"
Box = tuple[float, float, float, float]  # left, top, right, bottom
Colour = tuple[float, ...]  # red, green, blue
HOLE = 0.02, 1 / 3  # least and largest share of an image that is erased
UNCHANGED = 1.0, 1.0, 1.0  # factors of the brightness, the contrast and the saturation


@dataclass(kw_only=True)
class AugmentationFlags(RunConfig):
    """The flags of recipes whose images for training vary."""

    least_area: float = flag(0.6, "least share of an image that a random cut keeps", above=0, below=1.001)
    mirror: bool = flag(True, "mirror images at random; not for letters, digits, or left and right")
    colours: float = flag(0.3, "largest random change of brightness, contrast and saturation", minimum=0, below=1)
    erasing: float = flag(0.0, "share of images that lose a random rectangle", minimum=0, below=1.001)
    mixup: float = flag(0.0, "mix pairs of images; parameter of the shares, such as 0.2; 0: off", minimum=0)
    cutmix: float = flag(0.0, "replace a part of each image with another; parameter, such as 1; 0: off", minimum=0)


@dataclass(frozen=True)
class Preprocessing:
    """The images that a model expects: squares of `size` pixels a side, with `mean` and `std` of each colour."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, name_or_path: str) -> "Preprocessing":
        """The format of a pretrained model, from its settings. Raises UsageError if it has none."""
        from transformers.utils import cached_file

        try:
            try:
                content = json.loads(Path(str(cached_file(name_or_path, SETTINGS))).read_text())
            except OSError:  # a model of timm has them in its config
                found = json.loads(Path(str(cached_file(name_or_path, "config.json"))).read_text())["pretrained_cfg"]
                content = {"size": found["input_size"][-1], "image_mean": found["mean"], "image_std": found["std"]}
            size = content["crop_size"] if content.get("do_center_crop") else content["size"]
            sides = [*size.values()] if isinstance(size, dict) else [size]
            return cls(int(sides[0]), tuple(content["image_mean"]), tuple(content["image_std"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--model_name_or_path {name_or_path}: no {SETTINGS} with size, image_mean and image_std there "
                f"({first_line(error)})"
            ) from None

    def write(self, folder: Path) -> None:
        """Writes the settings for transformers' pipelines into the folder of an exported model."""
        from transformers import ViTImageProcessor

        sizes = {"size": {"shortest_edge": self.size}, "crop_size": self.size}  # the middle square, as in an evaluation
        colours = {"image_mean": self.mean, "image_std": self.std, "resample": Image.Resampling.BILINEAR}
        ViTImageProcessor(**sizes, **colours, do_center_crop=True).save_pretrained(folder)


@dataclass(eq=False, repr=False)
class CroppedImages(Dataset):
    """Samples {"image": float32 of shape (3, size, size), normalised; "label": int}.

    The label of images with several classes is a float32 tensor of shape (classes,), 1 for each of them. A mixed image
    also has "other_label", and "share", that of the first label. With weights of classes, a sample has a "weight".

    Args:
        source: the images.
        form: what the model expects.
        augmentation: how each image varies. None: the middle of the image stands for it.
        weights: of the classes.
    """

    source: Labelled
    form: Preprocessing
    augmentation: AugmentationFlags | None = None
    weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Random numbers belong to the seed, the epoch and the sample here: no config changes them.
        image, augmentation, label = self._read(index), self.augmentation, self.source.target(index)
        if augmentation is None:
            return {"image": self._resize(image, middle(*image.size)), "label": label}
        pixels = self._vary(image, augmentation)
        if augmentation.mixup or augmentation.cutmix:
            other = int(torch.randint(len(self), ()))
            varied = self._vary(self._read(other), augmentation)
            pixels, share = mix(pixels, varied, augmentation.mixup, augmentation.cutmix)
            return {
                "image": pixels,
                "label": label,
                "other_label": self.source.target(other),
                "share": torch.tensor(share),
            }
        sample = {"image": pixels, "label": label}
        return sample if self.weights is None else sample | {"weight": torch.tensor(self.weights[label])}

    def _read(self, index: int) -> Image.Image:
        image: Image.Image = self.source.samples[index]
        return image if image.mode == "RGB" else image.convert("RGB")

    def _vary(self, image: Image.Image, augmentation: AugmentationFlags) -> Tensor:
        box = random_box(*image.size, augmentation.least_area)
        # Drawn in any case, so that the rest stays the same.
        is_mirrored = bool(torch.rand(()) < 0.5) and augmentation.mirror
        colours = (1 + augmentation.colours * (2 * torch.rand(3) - 1)).tolist()
        pixels = self._resize(image, box, is_mirrored, colours)
        return erase(pixels) if augmentation.erasing and torch.rand(()) < augmentation.erasing else pixels

    def _resize(self, image: Image.Image, box: Box, is_mirrored: bool = False, colours: Any = UNCHANGED) -> Tensor:
        side = self.form.size
        levels = numpy.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box, reducing_gap=3))
        levels = numpy.ascontiguousarray((levels[:, ::-1] if is_mirrored else levels).transpose(2, 0, 1))
        pixels = torch.from_numpy(levels).view(3, -1).float()
        return normalise(pixels, self.form.mean, self.form.std, colours).view(3, side, side)


def middle(width: int, height: int) -> Box:
    """The largest square in the middle of an image."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, least_area: float) -> Box:
    """A random part of an image with this share of its area or more, of 3:4 to 4:3 of its proportions (Szegedy et al.
    2015)."""
    share, ratio, x, y = torch.rand(4).tolist()
    area = (least_area + (1 - least_area) * share) * width * height
    proportion = (3 / 4) ** (1 - 2 * ratio)
    box_width, box_height = min(width, math.sqrt(area * proportion)), min(height, math.sqrt(area / proportion))
    left, top = x * (width - box_width), y * (height - box_height)
    return left, top, left + box_width, top + box_height


@cache
def _limits(mean: Colour, std: Colour) -> tuple[Tensor, Tensor]:
    """Black and white, normalised; each of shape (3, 1)."""
    black, white = (torch.tensor([[(value - each) / scale] for each, scale in zip(mean, std)]) for value in (0, 1))
    return black, white


def normalise(levels: Tensor, mean: Colour, std: Colour, colours: tuple[float, float, float]) -> Tensor:
    """(value - mean) / std of each colour, after the change of the colours, which stay between black and white.

    Brightness, contrast and saturation together are one 3 × 3 matrix and a shift: one pass over the pixels.

    Args:
        levels: float32 of shape (3, pixels), 0 to 255.
        mean: of each colour, with white as 1.
        std: of each colour.
        colours: factors of the brightness, the contrast and the saturation.
    """
    brightness, contrast, saturation = colours
    factor = brightness * contrast / 255
    shift = (1 - contrast) * brightness * float(levels.mean()) / 255
    own, others = factor * (1 + 2 * saturation) / 3, factor * (1 - saturation) / 3
    rows = [[(own if row == column else others) / std[row] for column in range(3)] for row in range(3)]
    shifts = torch.tensor([[(shift - each) / scale] for each, scale in zip(mean, std)])
    return torch.addmm(shifts, torch.tensor(rows), levels).clamp_(*_limits(mean, std))


def erase(pixels: Tensor) -> Tensor:
    """The image (3, height, width) with a random rectangle of zeros, the mean colour (Zhong et al. 2020)."""
    height, width = pixels.shape[1:]
    share, ratio, x, y = torch.rand(4).tolist()
    area, proportion = (HOLE[0] + (HOLE[1] - HOLE[0]) * share) * height * width, 0.3 ** (1 - 2 * ratio)
    rows, columns = math.sqrt(area * proportion), math.sqrt(area / proportion)
    rows, columns = (max(1, min(side, round(length))) for side, length in ((height, rows), (width, columns)))
    top, left = int(y * (height - rows + 1)), int(x * (width - columns + 1))
    pixels[:, top : top + rows, left : left + columns] = 0
    return pixels


def mix(pixels: Tensor, other: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, float]:
    """(image, share of the first) of two images of shape (3, height, width): their mean (Zhang et al. 2018), or one
    with a rectangle of the other (Yun et al. 2019). The share is of a beta distribution with the parameter of the flag;
    with both, one of them, by chance."""
    cuts = random.random() < 0.5 if mixup and cutmix else bool(cutmix)
    alpha = cutmix if cuts else mixup
    share = random.betavariate(alpha, alpha)
    if not cuts:
        return other.lerp_(pixels, share), share
    height, width = pixels.shape[1:]
    rows, columns = (round(side * math.sqrt(1 - share)) for side in (height, width))
    # The centre is anywhere, as in the paper: of a rectangle at the edge a part is outside.
    top, left = random.randrange(height) - rows // 2, random.randrange(width) - columns // 2
    inside = slice(max(0, top), top + rows), slice(max(0, left), left + columns)
    pixels[:, *inside] = other[:, *inside]
    return pixels, 1 - pixels[0][inside].numel() / (height * width)


def loss_of_mixture(batch: dict[str, Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss of a batch (batch,), from that for labels. That of a mixed image is of both labels, by their shares."""
    if "share" not in batch:
        return loss(batch["label"])
    return loss(batch["other_label"]).lerp(loss(batch["label"]), batch["share"])


def load_labelled_images(data: str, max_samples: int | None = None) -> tuple[Labelled, Labelled]:
    """Loads images with their classes.

    Args:
        data: "shapes" (drawn ones); a folder with a sub-folder for each class, perhaps below "train" and "test"; a
            folder with parquet files; or a Hub id.
        max_samples: read so many images of each part as a stream.

    Returns:
        (training images, evaluation images). If the source has only one part, one image in five is held out.

    Raises:
        UsageError: no data, no images or no classes.
    """
    if data == "shapes":
        check_not_streamed(data, max_samples)
        generator = random.Random(0)  # the same images in each run
        labels = [number % len(SHAPES) for number in range(NUM_DRAWN)]
        parts = [Labelled([_draw(SHAPES[label], generator) for label in labels], labels, list(SHAPES))]
    else:
        parts = load_image_splits(data, ADVICE, max_samples)
    if len({*parts[0].labels}) < 2 and not parts[0].has_several:
        raise UsageError(
            f"--data {data} has images of one class, {parts[0].classes[parts[0].labels[0]]}: expected two or more, "
            "such as a sub-folder for each; of a table, --max_samples takes the first rows"
        )
    if len(parts) == 2:
        return parts[0], parts[1]
    rest, held_out = hold_out(len(parts[0].labels), one_in=5)
    return parts[0].part(rest), parts[0].part(held_out)


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
