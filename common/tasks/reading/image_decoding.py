"""Opens images of any format, for all recipes."""

import io
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import ExifTags, Image, ImageMode, UnidentifiedImageError

from ...data.facts import say
from ...errors import UsageError, first_line
from ...files import check_is_pulled
from .text_files import local_path

# How to turn an image with orientation tag 2, 3, ...; 1 is upright.
TURNS = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF
FRAMES, LEVELS = range(2)  # lines that an `Opener` prints once


class Opener:
    """Opens images.

    An image is what a viewer shows: upright, in 8 bits, on white where it is transparent, the first frame of several.
    It prints once, over all DataLoader workers, what it does with animations and with numbers that do not define white.
    """

    def __init__(self) -> None:
        self.said = torch.zeros(2, dtype=torch.uint8)
        with suppress(RuntimeError):  # without shared memory each worker prints it
            self.said.share_memory_()

    def __call__(self, file: Any, name: str) -> Image.Image:
        """An image in mode L or RGB, from a path, an image, bytes, or a dict with them. `name`: for messages."""
        if isinstance(file, dict):
            file = file.get("bytes") or file.get("path")
        try:
            with warnings.catch_warnings(action="ignore"):  # of Pillow, about images that it reads anyway
                if isinstance(file, Image.Image):
                    return self._decode(file, name)
                file = local_path(file) if isinstance(file, str) else file  # with ~ for the home folder
                with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                    shown = self._decode(image, name)
                    if not self.said[FRAMES]:
                        with suppress(Exception):  # frames after the first may be damaged
                            if image.format != "MPO" and getattr(image, "is_animated", False):  # phones add a preview
                                self._say(FRAMES, f"{name} has several frames: the run uses the first one")
                    return shown
        except UsageError:
            raise
        except Exception as error:  # Pillow raises many types
            raise UsageError(f"{name} cannot be read ({_reason(file, error)})") from None

    def _decode(self, image: Image.Image, name: str) -> Any:
        tiles = getattr(image, "tile", None)
        arguments = tiles[0].args if tiles else ""  # Pillow's mode of the pixels in the file, perhaps with others
        raw = str(arguments if isinstance(arguments, str) else (arguments or [""])[0])
        image.load()
        is_grey = ImageMode.getmode(image.mode).basemode == "L" or raw in ("LA", "LA;16B")  # which opens as RGBA
        has_palette, turn = image.mode.startswith("P"), -1
        with suppress(Exception):  # damaged tags
            turn = int(image.getexif().get(ExifTags.Base.Orientation, 1)) - 2
        if image.mode[0] in "IF":  # more than 8 bits; `convert` would cut them off at 255
            image = Image.fromarray(self._levels(image, raw, name))
        if image.has_transparency_data:
            _scale_key(image, raw)
            image = image.convert("LA") if image.mode == "La" else image
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert("L" if is_grey else "RGB")
        if has_palette:  # of greys, perhaps
            red, green, blue = (band.tobytes() for band in image.split())
            image = image.convert("L") if red == green == blue else image
        return image.transpose(Image.Transpose[TURNS[turn]]) if 0 <= turn < len(TURNS) else image

    def _levels(self, image: Image.Image, raw: str, name: str) -> numpy.ndarray:
        """uint8 of shape (height, width) for an image with more than 8 bits."""
        values, tags = numpy.asarray(image), getattr(image, "tag_v2", {})
        white = {"I": 65535, "F": 1}.get(image.mode) or 2 ** tags.get(BITS, (16,))[0] - 1
        if not (values.min() >= 0 and values.max() <= white):  # also NaN
            what = f"numbers from {values.min():g} to {values.max():g} for its brightness"
            advice = f"convert it to 8 or 16 bits (of numbers with 32 bits, 0 to {white} are read)"
            raise UsageError(f"{name} has {what}, and no standard defines which is white: {advice}")
        says_white = image.mode.startswith("I;16") or raw == "I;16B" or (image.mode, image.format) == ("I", "PPM")
        if not says_white:
            self._say(LEVELS, f"{name} has numbers of 32 bits: 0 counts as black and {white} as white")
        levels = numpy.rint(values.astype(numpy.float64) * (255 / white)).astype(numpy.uint8)
        if tags.get(PHOTOMETRIC) == 0:
            levels = 255 - levels
        return numpy.where(values == image.info.get("transparency", -1), numpy.uint8(255), levels)

    def _say(self, kind: int, line: str) -> None:
        if not self.said[kind]:
            self.said[kind] = 1
            say(line)


def _scale_key(image: Image.Image, raw: str) -> None:
    """Scales the colour that a PNG marks as transparent to the depth that Pillow gives the pixels."""
    key: Any = image.info.get("transparency")
    if key is None:
        return
    if raw in ("L;2", "L;4"):
        image.info["transparency"] = key * 255 // (2 ** int(raw[-1]) - 1)
    elif raw == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _reason(file: Any, error: Exception) -> str:
    if not isinstance(file, str | bytes | Path | Image.Image):
        return "it is missing" if file is None else f"it is {str(file)[:60]}"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels: make it smaller"
    if isinstance(error, UnidentifiedImageError):
        if isinstance(file, str | Path):
            check_is_pulled(Path(file))
        is_empty = Path(file).stat().st_size == 0 if isinstance(file, str | Path) else not file
        return "it is empty" if is_empty else "not an image that Pillow knows: expected a file such as PNG or JPEG"
    return getattr(error, "strerror", None) or first_line(error)
