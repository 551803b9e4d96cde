"""A small dataset in the file format of MNIST."""

import gzip
from pathlib import Path

import numpy


def write_idx(path: Path, values: numpy.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(length.to_bytes(4, "big") for length in values.shape)
    content = header + values.astype(numpy.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, suffix: str = "", num_images: int = 256) -> None:
    """Writes the four files of MNIST with a few images. The brightness of an image gives its class."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", num_images), ("t10k", 50)):
        labels = numpy.arange(size) % 4
        images = numpy.broadcast_to(labels[:, None, None] * 60, (size, 12, 12))
        write_idx(folder / f"{name}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte{suffix}", labels)
