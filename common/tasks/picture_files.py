"""Pictures as files hold them: one function opens a picture, for all recipes."""

import io
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import ExifTags, Image, ImageMode, UnidentifiedImageError

from ..data.facts import say
from ..errors import UsageError, first_line

# How to turn a picture with orientation tag 2, 3, ...; 1 is upright.
TURNS = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF
FRAMES, LEVELS = range(2)  # what an `Opener` says once


class Opener:
    """Opens pictures.

    A picture is what a viewer shows: upright, in 8 bits, on white where it is transparent, the first frame of several.
    What it does with animations and with numbers whose white nobody defines, it says once, in all workers of a loader.
    """

    def __init__(self) -> None:
        self.said = torch.zeros(2, dtype=torch.uint8)
        with suppress(RuntimeError):  # without shared memory each worker says it
            self.said.share_memory_()

    def __call__(self, file: Any, name: str) -> Image.Image:
        """A picture in mode L if it is grey, else RGB. Raises UsageError.

        Args:
            file: a path, a picture, its bytes, or a dict with "bytes" or "path", as `datasets` has it.
            name: for messages.
        """
        if isinstance(file, dict):
            file = file.get("bytes") or file.get("path")
        try:
            with warnings.catch_warnings(action="ignore"):  # of Pillow, about what it then reads
                if isinstance(file, Image.Image):
                    return self._decode(file, name)
                with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as picture:
                    shown = self._decode(picture, name)
                    self._mention_frames(picture, name)
                    return shown
        except UsageError:
            raise
        except Exception as error:  # Pillow raises many types
            raise UsageError(f"{name} cannot be read ({_reason(file, error)})") from None

    def _decode(self, picture: Image.Image, name: str) -> Image.Image:
        raw = _raw_mode(picture)
        picture.load()
        is_grey = ImageMode.getmode(picture.mode).basemode == "L" or raw.startswith("LA")  # LA of 16 bits opens as RGBA
        has_palette, turn = picture.mode.startswith("P"), _orientation(picture) - 2
        if picture.mode[0] in "IF":  # more than 8 bits; `convert` would cut them off at 255
            picture = Image.fromarray(self._levels(picture, raw, name))
        if picture.has_transparency_data:
            _scale_key(picture, raw)
            picture = picture.convert("LA") if picture.mode == "La" else picture
            paper = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(paper, picture.convert("RGBA"))
        picture = picture.convert("L" if is_grey else "RGB")
        if has_palette:  # of greys, perhaps
            red, green, blue = (band.tobytes() for band in picture.split())
            picture = picture.convert("L") if red == green == blue else picture
        return picture.transpose(Image.Transpose[TURNS[turn]]) if 0 <= turn < len(TURNS) else picture

    def _levels(self, picture: Image.Image, raw: str, name: str) -> numpy.ndarray:
        """uint8 of shape (height, width) for one with more than 8 bits."""
        values, tags = numpy.asarray(picture), getattr(picture, "tag_v2", {})
        white = {"I": 65535, "F": 1}.get(picture.mode) or 2 ** tags.get(BITS, (16,))[0] - 1
        if not (values.min() >= 0 and values.max() <= white):  # also NaN
            raise UsageError(
                f"{name} has numbers from {values.min():g} to {values.max():g} for its brightness, and nobody defines "
                f"which one is white: convert it to 8 or 16 bits (of numbers with 32 bits, 0 to {white} are read)"
            )
        says_white = picture.mode.startswith("I;16") or raw == "I;16B" or (picture.mode, picture.format) == ("I", "PPM")
        if not says_white:
            self._say(LEVELS, f"{name} has numbers of 32 bits: 0 is taken for black and {white} for white")
        levels = numpy.rint(values.astype(numpy.float64) * (255 / white)).astype(numpy.uint8)
        if tags.get(PHOTOMETRIC) == 0:
            levels = 255 - levels
        return numpy.where(values == picture.info.get("transparency", -1), numpy.uint8(255), levels)

    def _mention_frames(self, picture: Image.Image, name: str) -> None:
        if not self.said[FRAMES]:
            with suppress(Exception):  # frames after the first may be damaged
                if picture.format != "MPO" and getattr(picture, "is_animated", False):  # phones add a preview
                    self._say(FRAMES, f"{name} has several frames: of such pictures the first is taken")

    def _say(self, kind: int, line: str) -> None:
        if not self.said[kind]:
            self.said[kind] = 1
            say(line)


def _raw_mode(picture: Image.Image) -> str:
    """How the file holds the pixels, in Pillow's words; "" if it is not known."""
    tiles = getattr(picture, "tile", None)
    arguments = tiles[0].args if tiles else ""
    return str(arguments if isinstance(arguments, str) else (arguments or [""])[0])


def _orientation(picture: Image.Image) -> int:
    with suppress(Exception):  # damaged tags
        return int(picture.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


def _scale_key(picture: Image.Image, raw: str) -> None:
    """Gives the colour of a PNG that stands for transparent the depth that Pillow gives the pixels."""
    key: Any = picture.info.get("transparency")
    if key is None:
        return
    if raw in ("L;2", "L;4"):
        picture.info["transparency"] = key * 255 // (2 ** int(raw[-1]) - 1)
    elif raw == "RGB;16B":
        picture.info["transparency"] = tuple(value >> 8 for value in key)


def _reason(file: Any, error: Exception) -> str:
    if not isinstance(file, str | bytes | Path | Image.Image):
        return "it is missing" if file is None else f"it is {str(file)[:60]}"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels: make it smaller"
    if isinstance(error, UnidentifiedImageError):
        is_empty = Path(file).stat().st_size == 0 if isinstance(file, str | Path) else not file
        return "it is empty" if is_empty else "no image that Pillow knows: expected a file such as PNG or JPEG"
    return getattr(error, "strerror", None) or first_line(error)
