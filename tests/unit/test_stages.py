"""Promise: the largest stage of a pipeline is as small as possible."""

from itertools import pairwise

import pytest

from common.parallel.pipeline import layer_bounds


@pytest.mark.parametrize(
    ("sizes", "before", "after", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 0, 0, 2, [0, 2, 4]),
        ([1, 1, 1], 0, 0, 3, [0, 1, 2, 3]),
        ([1, 1, 1, 1], 0, 0, 1, [0, 4]),
        ([4, 4, 4, 4], 9, 0, 2, [0, 1, 4]),  # 13 and 12
        ([4, 4, 4, 4], 0, 5, 2, [0, 3, 4]),  # 12 and 9
        ([1, 1, 8, 1], 0, 0, 3, [0, 2, 3, 4]),
    ],
)
def test_largest_stage_is_as_small_as_can_be(
    sizes: list[int], before: int, after: int, num_stages: int, expected: list[int]
) -> None:
    def largest(bounds: list[int]) -> int:
        stages = [sum(sizes[start:end]) for start, end in pairwise(bounds)]
        stages[0] += before
        stages[-1] += after
        return max(stages)

    bounds = layer_bounds(sizes, before, after, num_stages)
    assert bounds[0] == 0 and bounds[-1] == len(sizes) and len(bounds) == num_stages + 1
    assert all(start < end for start, end in pairwise(bounds))
    assert largest(bounds) == largest(expected)
