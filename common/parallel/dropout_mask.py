"""Which elements dropout sets to zero, as a hash of their coordinates."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

# SplitMix64's increment, and the multipliers and shifts of its finalizer (Steele et al. 2014), as signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
LAST_SHIFT = 31
# One round of lowbias32 (Wellons 2018, https://nullprogram.com/blog/2018/07/31/).
SHIFT, MULTIPLIER = 15, 0x846CA68B - 2**32
CACHED = 2**22  # elements; on a CPU the samples of a larger tensor go one at a time, which stay in its cache


def dropped(key: int, starts: Sequence[int], shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """The elements of a block of a tensor that dropout sets to zero.

    Each element is a function of the key and its coordinates, not of the size of the block or of the device: the block
    of a larger tensor has the larger tensor's elements. Integer arithmetic that wraps gives the same bits everywhere.

    All coordinates but the last make a row: its 64-bit hash is computed once and combined with the hash of the last
    coordinate, so that a whole tensor needs seven cheap operations.

    Args:
        key: 64-bit, signed; another one for each call of dropout.
        starts: the coordinates of the block's first element.
        shape: of the block, two dimensions or more.
        p: the share of elements to drop, between 0 and 1.
        device: of the result.

    Returns:
        bool of this shape.
    """
    if device.type == "cpu" and shape[0] > 1 and prod(shape) > CACHED:
        samples = range(starts[0], starts[0] + shape[0])
        return torch.cat([dropped(key, (sample, *starts[1:]), (1, *shape[1:]), p, device) for sample in samples])
    rows = torch.full((), key, device=device)  # not torch.tensor: a copy stalls a GPU
    for start, size in zip(starts[:-1], shape[:-1]):
        rows = (rows * GOLDEN).unsqueeze(-1) + torch.arange(start, start + size, device=device)
    low, high = _mixed(rows).unsqueeze(-1).view(torch.int32).chunk(2, dim=-1)
    bits = (low ^ _columns(starts[-1], shape[-1], device)).mul_(high | 1)
    bits.bitwise_xor_(_shifted(bits, SHIFT)).mul_(MULTIPLIER)
    return bits < round(p * 2**32) - 2**31  # compares the high bits, which are the best


@lru_cache(maxsize=128)
def _columns(start: int, size: int, device: torch.device) -> Tensor:
    """A 32-bit hash of each last coordinate, int32 of shape (size,). Kept: on a GPU each operation has its price."""
    return _mixed(torch.arange(start, start + size, device=device)).view(torch.int32)[::2].contiguous()


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64's finalizer of int64 values."""
    for shift, multiplier in ROUNDS:
        values = (values ^ _shifted(values, shift)) * multiplier
    return values ^ _shifted(values, LAST_SHIFT)


def _shifted(values: Tensor, shift: int) -> Tensor:
    """Shifts to the right and fills with zeros; torch's own shift of signed integers fills with the sign."""
    num_bits = 8 * values.element_size()
    return (values >> shift).bitwise_and_((1 << (num_bits - shift)) - 1)
