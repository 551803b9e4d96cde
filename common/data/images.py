"""Image datasets: embedded, in files, or on the Hub."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from common.data.batches import Batch, InMemoryDataset
from common.data.sources import load_splits, sklearn_file
from common.environment import local_world_size
from common.errors import UsageError


class ImageDataset(InMemoryDataset):
    """Images of one size, each with a class, in memory.

    Samples are {"image": float32 of shape (channels, height, width) in [0, 1], "label": int64}.

    Args:
        images: uint8, shape (n, channels, height, width).
        labels: int64, shape (n,).
        num_classes: labels are 0 to num_classes - 1.
        classes: their names, if they have other names than these numbers.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, num_classes: int, classes: Sequence[str] | None = None
    ):
        self.images, self.labels, self.num_classes = images, labels, num_classes
        self.classes = list(classes or map(str, range(num_classes)))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, ids: torch.Tensor) -> Batch:
        return {"image": self.images.index_select(0, ids), "label": self.labels[ids]}

    def transform(self, batch: Batch) -> Batch:
        return batch | {"image": batch["image"].float().div_(255)}


def load_images(data: str) -> tuple[ImageDataset, ImageDataset]:
    """Loads an image-classification dataset.

    Args:
        data: "digits" (scikit-learn's 1,797 handwritten digits of 8 x 8); a folder with the four
            MNIST IDX files, gzipped or not, or with parquet files in the Hub's layout; or a Hub id,
            for example "ylecun/mnist".

    Returns:
        (training set, evaluation set). If the source has only one split, 20 % of it is held out,
        the same samples for every seed of the run.

    Raises:
        UsageError: no data, damaged files, images of different sizes, or no network.
    """
    if data == "digits":
        return _load_digits()
    folder = Path(data).expanduser()
    if folder.is_dir():
        return _load_folder(folder)
    if folder.exists():
        raise UsageError(f"--data {data} is a file: name the folder that holds the data")
    if data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise UsageError(f"--data {data}: no such folder; type --data digits for the embedded set")
    return _load_hub(data)


def _load_digits() -> tuple[ImageDataset, ImageDataset]:
    # The file that sklearn.datasets.load_digits reads. Importing sklearn would take 1.6 s. A row has
    # 64 pixels from 0 to 16, then the digit.
    with gzip.open(sklearn_file("digits.csv.gz"), "rt") as file:
        rows = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    images = (rows[:, :-1] * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    return _hold_out(ImageDataset(images, rows[:, -1].long(), num_classes=10))


def _hold_out(whole: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    num_held_out = len(whole) // 5
    held_out, rest = order[:num_held_out], order[num_held_out:]
    train, test = (
        ImageDataset(whole.images[ids], whole.labels[ids], whole.num_classes, whole.classes) for ids in (rest, held_out)
    )
    return train, test


# IDX is the format of the original MNIST files: two zero bytes, a type code, the number of
# dimensions, each dimension as a big-endian int32, then the values. Source: end of the page
# http://yann.lecun.com/exdb/mnist.
_IDX_UINT8 = 8
_IDX_FILES = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}


def _load_folder(folder: Path) -> tuple[ImageDataset, ImageDataset]:
    for place in (folder, folder / "MNIST" / "raw"):
        if any(place.glob("*-idx?-ubyte*")):
            train, test = (_read_idx_pair(place, images, labels) for images, labels in _IDX_FILES.values())
            if train[0].shape[1:] != test[0].shape[1:]:
                raise UsageError(
                    f"{place}: training images are {_size(train[0])}, test images {_size(test[0])}: expected one size"
                )
            num_classes = int(max(train[1].max(), test[1].max())) + 1
            return ImageDataset(*train, num_classes), ImageDataset(*test, num_classes)
    if any(folder.rglob("*.parquet")):
        return _load_hub(str(folder))
    raise UsageError(
        f"--data {folder}: no data there; expected the four MNIST IDX files (train-images-idx3-ubyte, ..., "
        "gzipped or not) or parquet files; type --data digits for the embedded set"
    )


def _size(images: torch.Tensor) -> str:
    return " x ".join(str(length) for length in images.shape[2:])


def _read_idx_pair(place: Path, images_name: str, labels_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = _read_idx(_idx_path(place, images_name, "3"), num_dimensions=3)
    labels = _read_idx(_idx_path(place, labels_name, "1"), num_dimensions=1)
    if len(images) != len(labels):
        raise UsageError(f"{place}: {images_name} has {len(images)} images but {labels_name} has {len(labels)} labels")
    if len(images) == 0:
        raise UsageError(f"{place}: {images_name} has no images")
    return images.unsqueeze(1), labels.long()


def _idx_path(place: Path, name: str, num_dimensions: str) -> Path:
    stem = f"{name}-idx{num_dimensions}-ubyte"
    for path in (place / stem, place / f"{stem}.gz"):
        if path.exists():
            return path
    raise UsageError(f"{place / stem}: no such file, and no {stem}.gz; expected all four MNIST IDX files")


def _read_idx(path: Path, num_dimensions: int) -> torch.Tensor:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is truncated or damaged ({error}): download it again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    header_size = 4 + 4 * num_dimensions
    if len(content) < header_size or content[:4] != bytes([0, 0, _IDX_UINT8, num_dimensions]):
        raise UsageError(f"{path} is not an IDX file of bytes with {num_dimensions} dimensions: download it again")
    shape = [int(length) for length in numpy.frombuffer(content, ">u4", num_dimensions, offset=4)]
    expected = header_size + int(numpy.prod(shape, dtype=numpy.int64))
    if len(content) != expected:
        raise UsageError(f"{path} has {len(content)} bytes, its header says {expected}: download it again")
    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=header_size).copy()).view(shape)


def _load_hub(data: str) -> tuple[ImageDataset, ImageDataset]:
    """Loads a Hub dataset, or a folder in the same layout."""
    advice = "type --data digits for the embedded set, or --data FOLDER for local MNIST IDX or parquet files"
    parts = [_decode(data, split) for split in load_splits(data, advice)]
    if len({part.image_shape for part in parts}) > 1:
        raise UsageError(f"--data {data}: the splits differ in image size: expected one size")
    if len(parts) == 1:
        return _hold_out(parts[0])
    classes = max((part.classes for part in parts), key=len)
    train, test = (ImageDataset(part.images, part.labels, len(classes), classes) for part in parts)
    return train, test


def _decode(data: str, split: Any) -> ImageDataset:
    import datasets

    image_column, label_column = _columns(data, split)
    split = split.cast_column(image_column, datasets.Image())
    label_feature = split.features[label_column]
    first = numpy.asarray(split[0][image_column])
    # Each process holds all images. Refuse a dataset that does not fit before it fills the memory.
    num_bytes = first.size * len(split) * local_world_size()
    if num_bytes > psutil.virtual_memory().available // 2:
        raise UsageError(
            f"--data {data}: the decoded images need {num_bytes / 1e9:.0f} GB of memory, too much for this machine: "
            "write a Dataset that decodes one image at a time, and type --num_workers"
        )
    images: list[numpy.ndarray] = []
    labels = []
    for row, sample in enumerate(split):
        image = sample[image_column]
        image = numpy.asarray(image if image.mode == "L" else image.convert("RGB"))
        if images and image.shape[:2] != images[0].shape[:2]:
            raise UsageError(
                f"--data {data}: image 0 is {_height_by_width(images[0])}, image {row} is {_height_by_width(image)}: "
                "expected one size; resize them first"
            )
        images.append(image)
        labels.append(sample[label_column])
    if {image.ndim for image in images} == {2, 3}:  # grey and colour mixed: convert all to colour
        images = [numpy.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image for image in images]
    pixels = torch.from_numpy(numpy.stack(images))
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    if not all(isinstance(label, int) and label >= 0 for label in labels):
        raise UsageError(
            f"--data {data}: expected whole numbers from 0 in column {label_column}, the class of each image"
        )
    num_classes = getattr(label_feature, "num_classes", None) or max(labels) + 1
    return ImageDataset(pixels, torch.tensor(labels), num_classes, getattr(label_feature, "names", None))


def _height_by_width(image: numpy.ndarray) -> str:
    return f"{image.shape[0]} x {image.shape[1]}"


def _columns(data: str, split: Any) -> tuple[str, str]:
    import datasets

    if len(split) == 0:
        raise UsageError(f"--data {data}: a split has no samples")
    features = split.features

    def holds_image(feature: Any) -> bool:
        # Parquet files from other tools lack the Image type but have its layout.
        return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)

    image = next((name for name, feature in features.items() if holds_image(feature)), None)
    label = next((name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
    label = label or next((name for name in ("label", "labels", "fine_label") if name in features), None)
    if image is None or label is None:
        raise UsageError(
            f"--data {data} is not an image-classification dataset: expected an image and a label column, found "
            f"{', '.join(features)}"
        )
    return image, label
