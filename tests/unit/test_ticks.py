"""The curves in the documentation have round ticks."""

import runpy

import pytest

from support.runs import ROOT

TICKS = runpy.run_path(str(ROOT / "docs/tools/curves.py"))["_ticks"]


@pytest.mark.parametrize(
    ("low", "high", "is_log", "expected"),
    [
        (0.0936, 2.3, True, [0.1, 1]),
        (0.05, 12, True, [0.1, 1, 10]),
        (0.3, 9, True, [0.5, 1, 2, 5]),
        (0.11, 0.98, False, [0.2, 0.4, 0.6, 0.8]),
        (97.3, 99.1, False, [97.5, 98, 98.5, 99]),
        (0, 1, False, [0, 0.5, 1]),
        (-3, 250, False, [0, 100, 200]),
        (0.5, 0.5, False, [0.5]),
    ],
)
def test_round_numbers(low: float, high: float, is_log: bool, expected: list[float]) -> None:
    assert TICKS(low, high, is_log) == pytest.approx(expected)
