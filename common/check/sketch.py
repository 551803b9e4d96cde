"""Random sums that give the distance of two tensors without keeping either."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import torch
from torch import Tensor, nn

WIDTH = 4096
BLOCK = 64 * WIDTH  # elements that are added at a time: a copy of them stays in the processor's cache


@dataclass(frozen=True)
class Sketch:
    """A count sketch of a tensor (Charikar et al. 2002): each element, times a random sign, is in one of `width` sums.

    The sketch of a difference is the difference of two sketches. The norm of a sketch equals the norm of the tensor
    within 2 % (one standard deviation; with 16 sums, 18 %), or exactly, if the tensor has at most `width` elements.
    """

    sums: Tensor  # float64 or complex128, on the CPU, of shape (width,), or of a smaller tensor's number of elements
    rounding: float  # relative rounding error of the tensor's type; 0 for whole numbers

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor, width: int = WIDTH) -> "Sketch":
        """The sketch of a plain tensor of any type; `width` divides 4,096."""
        has_rounding = tensor.is_floating_point() or tensor.is_complex()
        exact = torch.complex128 if tensor.is_complex() else torch.float64
        values = tensor.detach().reshape(-1)
        if len(values) <= width:
            sums = values.to(exact, copy=True)  # the weight changes
        else:
            sums = torch.zeros(width, dtype=exact, device=values.device)
            values = values if has_rounding else values.to(exact)
            for block, signs in zip(values.split(BLOCK), random_signs(values.device, values.dtype)):
                padded = block if len(block) == BLOCK else torch.nn.functional.pad(block, (0, -len(block) % width))
                sums += (padded * signs[: len(padded)]).view(-1, width).sum(0, dtype=exact)
        return cls(sums.cpu(), torch.finfo(tensor.dtype).eps if has_rounding else 0.0)

    def __add__(self, other: "Sketch") -> "Sketch":
        return Sketch(nn.utils.rnn.pad_sequence([self.sums, other.sums]).sum(1), self.rounding)  # a buffer may grow

    def __sub__(self, other: "Sketch") -> "Sketch":
        return self + Sketch(-other.sums, 0.0)

    @property
    def norm(self) -> float:
        """The L2 norm of the tensor."""
        return float(self.sums.norm())


def random_signs(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Iterator[Tensor]:
    """Random signs for each block of `BLOCK` elements in turn: windows into the same signs, which are drawn once."""
    signs, starts = _drawn(device, dtype, seed)
    return (signs[start : start + BLOCK] for start in cycle(starts))


@cache
def _drawn(device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (2 * BLOCK,), generator=generator, dtype=torch.int8) * 2 - 1
    return signs.to(device, dtype), torch.randint(BLOCK, (1021,), generator=generator).tolist()
