"""Image datasets: embedded, in files, or on the Hub."""

import gzip
import zlib
from pathlib import Path

import numpy
import torch

from ..errors import UsageError
from .hub_images import load_hub_images
from .image_sets import ImageDataset, Images, hold_out
from .sources import sklearn_file


def load_images(data: str, max_samples: int | None = None) -> tuple[Images, Images]:
    """Loads an image-classification dataset.

    Images that would fill more than half of the free memory are decoded when they are read, all others at the start.

    Args:
        data: "digits" (scikit-learn's 1,797 handwritten digits of 8 x 8); a folder with the four
            MNIST IDX files, gzipped or not, or with parquet files in the Hub's layout; or a Hub id,
            for example "ylecun/mnist".
        max_samples: read only so many images of each split, as a stream; see `load_splits`.

    Returns:
        (training set, evaluation set). If the source has only one split, 20 % of it is held out,
        the same samples for every seed of the run.

    Raises:
        UsageError: no data, damaged files, images of different sizes, or no network.
    """
    folder = Path(data).expanduser()
    if max_samples is not None and (data == "digits" or _idx_folder(folder)):
        raise UsageError(f"--max_samples is for sets of the Hub and parquet files, not for --data {data}: remove it")
    if data == "digits":
        return _load_digits()
    if folder.is_dir():
        return _load_folder(folder, max_samples)
    if folder.exists():
        raise UsageError(f"--data {data} is a file: name the folder that holds the data")
    if data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise UsageError(f"--data {data}: no such folder; type --data digits for the embedded set")
    return load_hub_images(data, max_samples)


def _load_digits() -> tuple[Images, Images]:
    # The file that sklearn.datasets.load_digits reads. Importing sklearn would take 1.6 s. A row has
    # 64 pixels from 0 to 16, then the digit.
    with gzip.open(sklearn_file("digits.csv.gz"), "rt") as file:
        rows = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    images = (rows[:, :-1] * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    return hold_out(ImageDataset(images, rows[:, -1].long(), num_classes=10))


# IDX is the format of the original MNIST files: two zero bytes, a type code, the number of
# dimensions, each dimension as a big-endian int32, then the values. Source: end of the page
# http://yann.lecun.com/exdb/mnist.
_IDX_UINT8 = 8
_IDX_FILES = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}


def _idx_folder(folder: Path) -> Path | None:
    return next((place for place in (folder, folder / "MNIST" / "raw") if any(place.glob("*-idx?-ubyte*"))), None)


def _load_folder(folder: Path, max_samples: int | None) -> tuple[Images, Images]:
    if place := _idx_folder(folder):
        train, test = (_read_idx_pair(place, images, labels) for images, labels in _IDX_FILES.values())
        if train[0].shape[1:] != test[0].shape[1:]:
            raise UsageError(
                f"{place}: training images are {_size(train[0])}, test images {_size(test[0])}: expected one size"
            )
        num_classes = int(max(train[1].max(), test[1].max())) + 1
        return ImageDataset(*train, num_classes), ImageDataset(*test, num_classes)
    if any(folder.rglob("*.parquet")):
        return load_hub_images(str(folder), max_samples)
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
