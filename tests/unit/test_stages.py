"""Promise: the stages of a pipeline have about the same number of layers."""

from itertools import pairwise

import pytest

from common.parallel.stages import layer_bounds


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_stages_differ_by_one_layer_at_most(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        bounds = layer_bounds(num_layers, num_stages)
        lengths = [end - start for start, end in pairwise(bounds)]
        assert bounds[0] == 0 and bounds[-1] == num_layers and len(lengths) == num_stages
        assert max(lengths) - min(lengths) <= 1 and lengths[-1] == min(lengths)
