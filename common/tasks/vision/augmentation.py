"""Random augmentation of images: crops, mirroring, colours, erased parts, and mixing with another image."""

import math
import random
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...config import RunConfig, flag

Box = tuple[float, float, float, float]  # left, top, right, bottom
Colour = tuple[float, ...]  # red, green, blue
Factors = tuple[float, float, float]  # of the brightness, the contrast and the saturation
HOLE = 0.02, 1 / 3  # least and largest share of an image that is erased
UNCHANGED: Factors = 1.0, 1.0, 1.0


@dataclass(kw_only=True)
class VaryingFlags(RunConfig):
    """The flags of recipes whose images for training vary."""

    least_area: float = flag(0.6, "smallest share of an image that a random crop keeps", above=0, maximum=1)
    mirror: bool = flag(True, "mirror images at random; not for letters, digits, or left and right")
    colours: float = flag(0.3, "largest random change of brightness, contrast and saturation", minimum=0, below=1)


@dataclass(kw_only=True)
class AugmentationFlags(VaryingFlags):
    """The flags of recipes whose images for training have holes, too, or mix."""

    erasing: float = flag(0.0, "probability of erasing a random rectangle", minimum=0, maximum=1)
    mixup: float = flag(0.0, "mixup alpha, such as 0.2: mixes pairs of images; 0: off", minimum=0)
    cutmix: float = flag(0.0, "CutMix alpha, such as 1: pastes a part of another image; 0: off", minimum=0)


def variation(width: int, height: int, flags: VaryingFlags | None) -> tuple[Box, bool, Factors]:
    """(a random part of an image, whether it is mirrored, factors of its colours). None: the whole, unchanged. The part
    has at least the flag's share of the area, and proportions from 3:4 to 4:3 (Szegedy et al. 2015)."""
    whole: Box = (0, 0, width, height)
    if flags is None:
        return whole, False, UNCHANGED
    share, ratio, x, y = torch.rand(4).tolist()
    area = (flags.least_area + (1 - flags.least_area) * share) * width * height
    proportion = (3 / 4) ** (1 - 2 * ratio)
    box_width, box_height = min(width, math.sqrt(area * proportion)), min(height, math.sqrt(area / proportion))
    left, top = x * (width - box_width), y * (height - box_height)
    box: Box = left, top, left + box_width, top + box_height
    box = whole if flags.least_area >= 1 else box  # a part of other proportions would be less
    # Drawn in any case, so that the rest stays the same.
    is_mirrored = bool(torch.rand(()) < 0.5) and flags.mirror
    brightness, contrast, saturation = (1 + flags.colours * (2 * torch.rand(3) - 1)).tolist()
    return box, is_mirrored, (brightness, contrast, saturation)


def middle(width: int, height: int) -> Box:
    """The largest square in the middle of an image."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


@cache
def _limits(mean: Colour, std: Colour) -> tuple[Tensor, Tensor]:
    """Black and white, normalised; each of shape (3, 1)."""
    black, white = (torch.tensor([[(value - each) / scale] for each, scale in zip(mean, std)]) for value in (0, 1))
    return black, white


def normalise(levels: Tensor, mean: Colour, std: Colour, colours: Factors) -> Tensor:
    """(value - mean) / std of each colour, after the change of the colours, which stay between black and white.

    Brightness, contrast and saturation together are one 3 × 3 matrix and a shift: one pass over the pixels. `levels`:
    float32 of shape (3, pixels), 0 to 255; `mean` and `std`: of each colour, with white as 1.
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
    """(image, share of the first) of two images (3, height, width): mixed (Zhang et al. 2018), or with a rectangle of
    the other (Yun et al. 2019); with both flags, one by chance. The share has a beta distribution."""
    cuts = random.random() < 0.5 if mixup and cutmix else bool(cutmix)
    alpha = cutmix if cuts else mixup
    share = random.betavariate(alpha, alpha)
    if not cuts:
        return other.lerp_(pixels, share), share
    height, width = pixels.shape[1:]
    rows, columns = (round(side * math.sqrt(1 - share)) for side in (height, width))
    # The centre is anywhere, as in the paper: a part of a rectangle at the edge is outside.
    top, left = random.randrange(height) - rows // 2, random.randrange(width) - columns // 2
    inside = slice(max(0, top), top + rows), slice(max(0, left), left + columns)
    pixels[:, *inside] = other[:, *inside]
    return pixels, 1 - pixels[0][inside].numel() / (height * width)
