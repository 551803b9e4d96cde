"""Draws from all combinations of parameters, so that `make test` stays short."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def drawn(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of these values. `make test` runs each value at least once, `make test-full` all."""
    longest = max(map(len, axes))
    often = {tuple(axis[number % len(axis)] for axis in axes) for number in range(longest)}
    return [cell if cell in often else pytest.param(*cell, marks=pytest.mark.full) for cell in product(*axes)]
