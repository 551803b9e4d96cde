"""Promise: the stages of a pipeline have about the same number of layers, and each layer is in one of them."""

from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes.common.parallel.stages import keep_stage, layer_bounds


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_stages_differ_by_one_layer_at_most(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        bounds = layer_bounds(num_layers, num_stages)
        lengths = [end - start for start, end in pairwise(bounds)]
        assert bounds[0] == 0 and bounds[-1] == num_layers and len(lengths) == num_stages
        assert max(lengths) - min(lengths) <= 1 and lengths[-1] == min(lengths)


def test_what_all_stages_keep_is_named() -> None:
    """One stage has it written to a checkpoint."""
    names = []
    for index in range(2):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=3, **sizes))
        model.register_buffer("scale", torch.ones(1))
        assert keep_stage(model, index, 2) == {"scale"}
        names.append({*model.state_dict()})
    assert names[0] & names[1] == {"scale"}
