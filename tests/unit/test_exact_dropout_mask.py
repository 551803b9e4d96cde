"""The masks of `--exact_dropout`: a function of coordinates alone, with the statistics of independent draws."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.parallel.dropout_mask import dropped
from common.parallel.exact_dropout import attention_probabilities

CPU = torch.device("cpu")
SHAPE = (8, 6, 64, 96)


def mask(key: int, shape: tuple[int, ...] = SHAPE, p: float = 0.1, starts: tuple[int, ...] | None = None) -> Tensor:
    return dropped(key, starts or (0,) * len(shape), shape, p, CPU)


def expected(key: int, place: tuple[int, ...], p: float) -> bool:
    """The same hash of one element, in Python's integers."""

    def mixed(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    row = key
    for coordinate in place[:-1]:
        row = (row * 0x9E3779B97F4A7C15 + coordinate) % 2**64
    row = mixed(row)
    bits = ((row % 2**32) ^ (mixed(place[-1]) % 2**32)) * ((row >> 32) | 1) % 2**32
    bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
    return (bits ^ 2**31) < round(p * 2**32)  # as torch compares signed integers


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_the_bits_are_those_of_the_formula(key: int) -> None:
    for starts in ((0, 0, 0, 0), (1000, 3, 70, 4000)):
        drops = mask(key, (3, 2, 4, 5), 0.5, starts)
        for offset in torch.cartesian_prod(*map(torch.arange, (3, 2, 4, 5))).tolist():
            place = tuple(start + step for start, step in zip(starts, offset))
            assert bool(drops[tuple(offset)]) == expected(key % 2**64, place, 0.5)


def test_a_block_has_the_bits_of_the_whole() -> None:
    whole = mask(5)
    assert torch.equal(mask(5, (2, 3, 10, 17), starts=(4, 2, 7, 11)), whole[4:6, 2:5, 7:17, 11:28])
    assert mask(5, (2, 0, 4)).shape == (2, 0, 4)
    large = mask(5, (3, 1500, 1000), starts=(8, 0, 0))  # made in parts
    assert torch.equal(large[:, 1400:], mask(5, (3, 100, 1000), starts=(8, 1400, 0)))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p: float) -> None:
    for key in (1, 2, 3):
        drops = mask(key, p=p).double()
        deviation = math.sqrt(p * (1 - p))
        assert abs(drops.mean() - p) < 5 * deviation / math.sqrt(drops.numel())
        for dimension in range(4):  # also of each sample, head, row and column
            others = [other for other in range(4) if other != dimension]
            shares = drops.mean(others)
            assert (shares - p).abs().max() < 5 * deviation / math.sqrt(drops.numel() / len(shares))


def correlation(first: Tensor, second: Tensor) -> float:
    """In units of its standard deviation for independent masks."""
    pair = torch.stack([first.flatten(), second.flatten()]).double()
    return float(torch.corrcoef(pair)[0, 1]) * math.sqrt(pair.shape[1])


def test_neighbours_are_uncorrelated() -> None:
    drops = mask(7)
    for dimension, size in enumerate(SHAPE):
        for distance in {1, 2, 3, 4, size // 2}:
            near = drops.narrow(dimension, 0, size - distance)
            assert abs(correlation(near, drops.narrow(dimension, distance, size - distance))) < 5
    above = torch.triu_indices(64, 64, 1)
    assert abs(correlation(drops[:, :, above[0], above[1]], drops[:, :, above[1], above[0]])) < 5
    for other in (6, 8, 7 + 2**32, -7):
        assert abs(correlation(drops, mask(other))) < 5


def test_rows_differ_as_much_as_independent_ones() -> None:
    rows = mask(11, (64, 64, 64), 0.5).flatten(0, 1).double()
    agreement = torch.corrcoef(rows)[torch.triu_indices(4096, 4096, 1).unbind()] * math.sqrt(64)
    assert abs(agreement.square().mean() - 1) < 0.05 and agreement.abs().max() < 7.5


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "scale"])
def test_attention_is_that_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    allowed[0, 0, 2] = False  # this query attends to nothing
    attn_mask = {"bool": allowed, "float": torch.randn(5, 5, dtype=torch.float64)}.get(kind)
    is_causal, scale = kind == "causal", 0.3 if kind == "scale" else None
    found = attention_probabilities(query, key, attn_mask, is_causal, scale).double() @ value
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    for tensor, other in zip(*(torch.autograd.grad(one.sin().sum(), (query, key, value)) for one in (found, wanted))):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-5)
