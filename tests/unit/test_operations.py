"""Promise: tensor parallelism notes a tensor of features that meets a divided layer's output, and no mask of keys."""

import torch
from torch import Tensor, nn

from accelerate_recipes.common.parallel.operations import Operations


def found(keys: int, of_features: bool) -> set[str]:
    """What a pass computes from the output of a divided layer that has a feature for each head."""
    layer, operations = nn.Embedding(8, 4), Operations()

    def passes(positions: Tensor) -> Tensor:
        biases = layer(positions)  # (queries, keys, heads)
        if of_features:
            return biases * torch.ones(4)
        return biases.permute(2, 0, 1).masked_fill(torch.zeros(keys, dtype=torch.bool), 0.0)

    with operations.watch([("biases", layer)], {"biases": "colwise"}):
        passes(torch.zeros(3, keys, dtype=torch.long))
    return {what for what in operations.found if "another tensor" in what}


def test_a_mask_of_keys_is_not_one_of_features() -> None:
    assert found(4, of_features=True) == {"mul with another tensor of biases"}
    assert not found(4, of_features=False)
