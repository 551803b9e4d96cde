"""Images of one size: embedded, in files, or on the Hub; and what an image classifier needs besides its weights."""

import gzip
import json
import math
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy
import psutil
import torch
from PIL import ImageOps

from ...data.sets import Batch, InMemoryDataset
from ...environment import Environment
from ...errors import UsageError
from ...files import read_file
from ..reading.image_decoding import Opener
from ..reading.labelled import check_differ
from ..reading.labelled_images import load_image_splits
from ..reading.sources import check_not_streamed, hold_out, sklearn_file
from ..reading.text_files import local_path, open_bytes

ADVICE = "use --data digits for the embedded set, or --data FOLDER for MNIST's IDX files, images or parquet files"
NUM_LOOKED_AT = 1000  # training images, about
MOST_PIXELS = 2**26  # of an image
Shape = tuple[int, int, int]  # channels, height, width


class ImageDataset(InMemoryDataset):
    """Images of one size in memory, each with a class.

    Samples are {"image": float32 of shape (channels, height, width) in [0, 1], "label": int64}.

    Args:
        images: uint8 of shape (n, channels, height, width).
        labels: int64 of shape (n,), 0 to num_classes - 1.
        classes: their names, if these are not the numbers.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, num_classes: int, classes: Sequence[str] | None = None
    ):
        self.images, self.labels = images, labels
        self.image_shape: Shape = tuple(images.shape[1:])  # type: ignore[assignment]
        self.num_classes, self.classes = num_classes, list(classes or map(str, range(num_classes)))

    def __len__(self) -> int:
        return len(self.images)

    def part(self, ids: torch.Tensor) -> "ImageDataset":
        """The images of these ids, as a set."""
        return ImageDataset(self.images[ids], self.labels[ids], self.num_classes, self.classes)

    def rows(self, ids: torch.Tensor) -> Batch:
        return {"image": self.images.index_select(0, ids), "label": self.labels.index_select(0, ids)}

    def transform(self, batch: Batch) -> Batch:
        return batch | {"image": batch["image"] / 255}


def load_images(data: str, max_samples: int | None = None) -> tuple[ImageDataset, ImageDataset]:
    """(training set, evaluation set) of images with a class each. If the source has only one split, 20 % of it is held
    out, the same samples for every seed of the run.

    All images are decoded at the start, and stay in memory. Raises UsageError for missing data, damaged files, images
    of different sizes or more than half of the free memory, or no network.

    Args:
        data: "digits" (scikit-learn's 1,797 handwritten digits of 8 x 8); a folder with the four MNIST IDX files,
            gzipped or not, or with parquet files in the Hub's layout; or a Hub id, such as "ylecun/mnist".
        max_samples: read only this many images of each split, as a stream; see `load_tables`.
    """
    folder = local_path(data)
    places = [place for place in (folder, folder / "MNIST" / "raw") if any(place.glob("*-idx?-ubyte*"))]
    if data != "digits" and not places:
        return _load_in_memory(data, max_samples)
    check_not_streamed(data, max_samples)
    return _load_digits() if data == "digits" else _load_idx(places[0])


def _split(whole: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
    rest, held_out = hold_out(len(whole), one_in=5)
    return whole.part(rest), whole.part(held_out)


def _load_digits() -> tuple[ImageDataset, ImageDataset]:
    # The file that sklearn.datasets.load_digits reads. Importing sklearn would take 1.6 s. A row has
    # 64 pixels from 0 to 16, then the digit.
    with gzip.open(sklearn_file("digits.csv.gz"), "rt") as file:
        rows = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    images = (rows[:, :-1] * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    return _split(ImageDataset(images, rows[:, -1].long(), num_classes=10))


def _load_idx(place: Path) -> tuple[ImageDataset, ImageDataset]:
    sets = []
    for part in ("train", "t10k"):
        images, labels = _read_idx(place, f"{part}-images", 3), _read_idx(place, f"{part}-labels", 1)
        if len(images) != len(labels):
            raise UsageError(f"{place}: {part}-images has {len(images)} images, {part}-labels {len(labels)} labels")
        if len(images) == 0 or min(images.shape[1:]) < 4:
            raise UsageError(f"{place}: {part}-images has no images of 4 x 4 pixels or more")
        sets.append((images.unsqueeze(1), labels.long()))
    train, test = sets
    if train[0].shape[1:] != test[0].shape[1:]:
        sizes = [" x ".join(map(str, images.shape[2:])) for images, _ in sets]
        raise UsageError(f"{place}: training images are {sizes[0]}, test images {sizes[1]}: expected one size")
    check_differ(place, train[1].tolist(), "labels for training")
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    return ImageDataset(*train, num_classes), ImageDataset(*test, num_classes)


def _read_idx(place: Path, name: str, num_dimensions: int) -> torch.Tensor:
    """The values of a file in IDX, the format of the original MNIST files: two zero bytes, a type code (8 for bytes),
    the number of dimensions, each dimension as a big-endian int32, then the values. Source: end of the page
    http://yann.lecun.com/exdb/mnist. Raises UsageError."""
    whole = place / f"{name}-idx{num_dimensions}-ubyte"
    if (path := next((path for path in (whole, Path(f"{whole}.gz")) if path.exists()), None)) is None:
        raise UsageError(f"{whole}: no such file, and no {whole.name}.gz; expected all four MNIST IDX files")
    with open_bytes(path) as file:
        content = file.read()
    header_size = 4 + 4 * num_dimensions
    if len(content) < header_size or content[:4] != bytes([0, 0, 8, num_dimensions]):
        raise UsageError(f"{path} is not an IDX file of bytes with {num_dimensions} dimensions: download it again")
    shape = [int(length) for length in numpy.frombuffer(content, ">u4", num_dimensions, offset=4)]
    if len(content) != (expected := header_size + math.prod(shape)):
        raise UsageError(f"{path} has {len(content)} bytes, but its header says {expected}: download it again")
    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=header_size).copy()).view(shape)


def _load_in_memory(data: str, max_samples: int | None) -> tuple[ImageDataset, ImageDataset]:
    """Loads images of one size: a dataset of the Hub, a folder in the same layout, or one of classes."""
    parts = load_image_splits(data, ADVICE, max_samples)
    num_images, classes = sum(len(part.labels) for part in parts), parts[0].classes
    if parts[0].has_several:
        raise UsageError(f"--data {data} has images with several classes: use recipes/image_classification.py")
    # Each process holds all images.
    size = numpy.asarray(parts[0].samples[0]).size * num_images * Environment.read().local_world_size
    if size > psutil.virtual_memory().available // 2:
        what = f"its {num_images:,} images would fill the memory ({size / 1e9:.2g} GB in all processes)"
        raise UsageError(f"--data {data}: {what}: use --max_samples with a smaller number")
    images = [[numpy.asarray(image) for image in part.samples] for part in parts]
    shape = 3 if any(image.ndim == 3 for part in images for image in part) else 1, *images[0][0].shape[:2]
    if min(shape[1:]) < 4:
        raise UsageError(f"--data {data}: images of {shape[1]} x {shape[2]} pixels: expected 4 x 4 or more")
    sets = []
    for part, pixels in zip(parts, images):
        for row, image in enumerate(pixels):
            if image.shape[:2] != shape[1:]:
                what = f"{part.samples.name(row)} {image.shape[0]} x {image.shape[1]}: expected one size"
                first = f"{parts[0].samples.name(0)} has {shape[1]} x {shape[2]} pixels"
                raise UsageError(f"{first}, {what}; resize them first")
        whole = numpy.stack([numpy.broadcast_to(numpy.atleast_3d(image), (*shape[1:], shape[0])) for image in pixels])
        tensor = torch.from_numpy(whole).permute(0, 3, 1, 2).contiguous()
        sets.append(ImageDataset(tensor, torch.tensor(part.labels), len(classes), classes))
    return _split(sets[0]) if len(sets) == 1 else (sets[0], sets[1])


@dataclass(frozen=True)
class ImageFormat:
    """The training images, as `<output_dir>/model/config.json` describes them."""

    network: str  # the recipe's name of the network
    image_shape: tuple[int, int, int]  # (channels, height, width)
    classes: list[str]  # their names
    background: str  # "dark" or "light" if the edges of grey images are; "mixed" for all others

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
        """Reads what `write` wrote. Raises UsageError unless it is an image classifier with one of these networks."""
        path = output_dir / "model" / "config.json"
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # such as another recipe's
            entries = json.loads(read_file(path))
            form = cls(**entries | {"image_shape": tuple(entries["image_shape"])})
            has_types = {*map(type, form.image_shape)} == {int} and {*map(type, form.classes)} == {str}
            is_size = len(form.image_shape) == 3 and min(form.image_shape) > 0
            if has_types and is_size and math.prod(form.image_shape) <= MOST_PIXELS and form.network in networks:
                return form
        if not any(path.parent.glob("*.safetensors")):
            advice = "train first (the same command without --predict), or use the --output_dir of a finished run"
            raise UsageError(f"no model in {path.parent}: {advice}")
        advice = "train again with --overwrite_output_dir, or use the --output_dir of a run of this recipe"
        raise UsageError(f"{path} does not describe an image classifier: {advice}")


def read_image(path: str | Path, form: ImageFormat) -> torch.Tensor:
    """An image in the shape of the training images: float32 (channels, height, width) in [0, 1], scaled and cropped
    around the middle. Turns dark on light into light on dark, if the training images are. Raises UsageError."""
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
