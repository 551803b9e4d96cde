"""Images that vary at random: another part, mirrored, in other colours, with a hole, or mixed with another image."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Box = tuple[float, float, float, float]  # left, top, right, bottom
HOLE = 0.02, 1 / 3  # least and largest share of an image that is erased (Zhong et al. 2020)


@dataclass(frozen=True)
class Augmentation:
    """How each image for training varies.

    Attributes:
        least_area: a random part of the image stands for it, with this share of its area or more, in other
            proportions (Szegedy et al. 2015).
        mirror: mirror every other image by chance.
        colours: largest change of the brightness, the contrast and the saturation; 0.3: each times 0.7 to 1.3.
        erasing: probability that a random rectangle gets the mean colour (Zhong et al. 2020).
        mixup: each image is mixed with another one of the set; the share of each is of a beta distribution with this
            parameter (Zhang et al. 2018). 0: not.
        cutmix: the same, but a rectangle of the other one replaces that of the image (Yun et al. 2019). With both, one
            of them, by chance.
    """

    least_area: float
    mirror: bool = True
    colours: float = 0.3
    erasing: float = 0
    mixup: float = 0
    cutmix: float = 0


class ColourChange(NamedTuple):
    """Factors of the brightness, the contrast and the saturation."""

    brightness: float = 1
    contrast: float = 1
    saturation: float = 1


UNCHANGED = ColourChange()


def middle(width: int, height: int) -> Box:
    """The largest square in the middle of an image."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, least_area: float) -> Box:
    """A random part of an image with this share of its area or more, of 3:4 to 4:3 of its proportions."""
    share, ratio, x, y = torch.rand(4).tolist()
    area = (least_area + (1 - least_area) * share) * width * height
    proportion = (3 / 4) ** (1 - 2 * ratio)
    box_width, box_height = min(width, math.sqrt(area * proportion)), min(height, math.sqrt(area / proportion))
    left, top = x * (width - box_width), y * (height - box_height)
    return left, top, left + box_width, top + box_height


def normalise(levels: Tensor, mean: tuple[float, ...], std: tuple[float, ...], colours: ColourChange) -> Tensor:
    """(value - mean) / std of each colour, after the change of the colours, which stay between black and white.

    Brightness, contrast and saturation together are one 3 × 3 matrix and a shift: one pass over the pixels.

    Args:
        levels: float32 of shape (3, pixels), 0 to 255.
        mean: of each colour, with white as 1.
        std: of each colour.
        colours: the change.
    """
    brightness, contrast, saturation = colours
    factor = brightness * contrast / 255
    shift = (1 - contrast) * brightness * float(levels.mean()) / 255
    own, others = factor * (1 + 2 * saturation) / 3, factor * (1 - saturation) / 3
    rows = [[(own if row == column else others) / std[row] for column in range(3)] for row in range(3)]
    shifts, black, white = (
        torch.tensor([[(value - each) / scale] for each, scale in zip(mean, std)]) for value in (shift, 0, 1)
    )
    return torch.addmm(shifts, torch.tensor(rows), levels).clamp_(black, white)


def erase(pixels: Tensor) -> Tensor:
    """The image (3, height, width) with a random rectangle of zeros, the mean colour."""
    height, width = pixels.shape[1:]
    share, ratio, x, y = torch.rand(4).tolist()
    area, proportion = (HOLE[0] + (HOLE[1] - HOLE[0]) * share) * height * width, 0.3 ** (1 - 2 * ratio)
    rows, columns = math.sqrt(area * proportion), math.sqrt(area / proportion)
    rows, columns = (max(1, min(side, round(length))) for side, length in ((height, rows), (width, columns)))
    top, left = int(y * (height - rows + 1)), int(x * (width - columns + 1))
    pixels[:, top : top + rows, left : left + columns] = 0
    return pixels


def mix(pixels: Tensor, other: Tensor, augmentation: Augmentation) -> tuple[Tensor, float]:
    """(image, share of the first) of two images of shape (3, height, width), by mixup or cutmix."""
    both = augmentation.mixup and augmentation.cutmix
    cuts = random.random() < 0.5 if both else bool(augmentation.cutmix)
    alpha = augmentation.cutmix if cuts else augmentation.mixup
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
