"""Images of all sizes with a class each, cut and recoloured at random: drawn, in folders, or on the Hub."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UsageError, first_line
from .labelled_images import LabelledImages, load_image_splits
from .sources import hold_out

HELD_OUT = 5  # one image in so many is for evaluation, if the source has no evaluation part
NUM_DRAWN = 3000
SHAPES = ("circle", "cross", "ring", "square", "star", "triangle")
SETTINGS = "preprocessor_config.json"  # of transformers, with the size and colours that a model expects
ADVICE = "use --data shapes for the embedded images, or the path of a folder"


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects: squares of `size` pixels a side, with `mean` and `std` of each colour."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, name_or_path: str) -> "Preprocessing":
        """The format of a pretrained model, from its settings. Raises UsageError if it has none."""
        from transformers.utils import cached_file

        try:
            content = json.loads(Path(str(cached_file(name_or_path, SETTINGS))).read_text())
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
        content = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": self.size},  # then the middle square, as in an evaluation
            "resample": int(Image.Resampling.BILINEAR),
            "do_center_crop": True,
            "crop_size": {"height": self.size, "width": self.size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.std,
        }
        (folder / SETTINGS).write_text(json.dumps(content, indent=2) + "\n")


class CroppedImages(Dataset):
    """Samples {"image": float32 of shape (3, size, size), normalised; "label": int}.

    Args:
        source: the images.
        form: what the model expects.
        least_area: a random part of the image stands for it, with this share of its area or more, in other
            proportions (Szegedy et al. 2015), perhaps mirrored, in other colours. None: the middle of the image.
        mirror: mirror every other image by chance.
    """

    def __init__(self, source: LabelledImages, form: Preprocessing, least_area: float | None, mirror: bool = True):
        self.source, self.form, self.least_area, self.mirror = source, form, least_area, mirror
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (form.mean, form.std))

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Random numbers belong to the seed, the epoch and the sample here: no config changes them.
        image: Image.Image = self.source.images[index].convert("RGB")
        box = _middle(*image.size) if self.least_area is None else _random_box(*image.size, self.least_area)
        side = self.form.size
        resized = image.resize((side, side), Image.Resampling.BILINEAR, box, reducing_gap=3)
        pixels = torch.from_numpy(numpy.array(resized)).permute(2, 0, 1).float() / 255
        if self.least_area is not None:
            is_mirrored = torch.rand(()) < 0.5 and self.mirror  # drawn in any case, so that the rest stays the same
            pixels = _jitter_colours(pixels.flip(-1) if is_mirrored else pixels)
        return {"image": (pixels - self.mean) / self.std, "label": self.source.labels[index]}


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int, least_area: float) -> tuple[float, float, float, float]:
    share, ratio, x, y = torch.rand(4).tolist()
    area = (least_area + (1 - least_area) * share) * width * height
    proportion = (3 / 4) ** (1 - 2 * ratio)  # 3/4 to 4/3
    box_width, box_height = min(width, math.sqrt(area * proportion)), min(height, math.sqrt(area / proportion))
    left, top = x * (width - box_width), y * (height - box_height)
    return left, top, left + box_width, top + box_height


def _jitter_colours(pixels: Tensor) -> Tensor:
    """Other brightness, contrast and saturation, each times 0.7 to 1.3."""
    brightness, contrast, saturation = (0.7 + 0.6 * torch.rand(3)).tolist()
    pixels = pixels * brightness
    pixels = torch.lerp(pixels.mean(), pixels, contrast)
    return torch.lerp(pixels.mean(0, keepdim=True), pixels, saturation).clamp(0, 1)


def load_labelled_images(data: str, max_samples: int | None = None) -> tuple[LabelledImages, LabelledImages]:
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
        if max_samples is not None:
            raise UsageError("--max_samples is for sets of the Hub and files, not for --data shapes: remove it")
        parts = [_draw_shapes()]
    else:
        parts = load_image_splits(data, ADVICE, max_samples)
    if len({*parts[0].labels}) < 2:
        raise UsageError(
            f"--data {data} has images of one class, {parts[0].classes[parts[0].labels[0]]}: expected two or more, "
            "such as a sub-folder for each; of a table, --max_samples takes the first rows"
        )
    if len(parts) == 2:
        return parts[0], parts[1]
    rest, held_out = hold_out(len(parts[0].labels), HELD_OUT)
    return parts[0].part(rest), parts[0].part(held_out)


def _draw_shapes() -> LabelledImages:
    """Shapes of all colours, sizes and places on images of all sizes, the same in each run."""
    generator = random.Random(0)
    labels = [number % len(SHAPES) for number in range(NUM_DRAWN)]
    images = [_draw(SHAPES[label], generator) for label in labels]
    return LabelledImages(images, labels, list(SHAPES))


def _draw(shape: str, generator: random.Random) -> Image.Image:
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


class Confusion:
    """How often each class is taken for each other one, in the last evaluation.

    Args:
        classes: their names.

    Attributes:
        counts: images, of shape (class, predicted class); None before an evaluation.
    """

    def __init__(self, classes: list[str]):
        self.classes = classes
        self.counts: Tensor | None = None

    def __call__(self, examples: dict[str, Tensor]) -> dict[str, float]:
        """For `examples` of `fit`, from "label" and "predicted": the mean over the classes of the right share."""
        number = len(self.classes)
        places = examples["label"].long() * number + examples["predicted"].long()
        self.counts = torch.bincount(places, minlength=number**2).view(number, number)
        sizes = self.counts.sum(1)
        return {"balanced_accuracy": float((self.counts.diag() / sizes)[sizes > 0].mean())}

    def write(self, path: Path) -> None:
        """Draws the counts, a row for each class and a column for each predicted one, darker for a larger share. Words
        and numbers only if there is room."""
        if self.counts is None:  # a run that was already done
            return
        cell = max(2, min(24, 1600 // len(self.classes)))
        has_room, sizes = cell >= 16, self.counts.sum(1).tolist()
        label = 8 * max(map(len, self.classes)) if has_room else 0
        image = Image.new("RGB", (label + cell * len(sizes), cell * len(sizes)), "white")
        draw = ImageDraw.Draw(image)
        for row, name in enumerate(self.classes if has_room else ()):
            draw.text((2, cell * row + cell // 4), name, fill="black")
        for row, column in self.counts.nonzero().tolist():
            count = int(self.counts[row, column])
            left, top, share = label + cell * column, cell * row, count / sizes[row]
            light = round(255 * (1 - share))
            draw.rectangle((left, top, left + cell - 2, top + cell - 2), fill=(light, light, 255))
            if has_room:
                draw.text((left + 2, top + cell // 4), str(count), fill="black" if share < 0.5 else "white")
        image.save(path)
        print(f"{path}: a row for each class, a column for each predicted one")
