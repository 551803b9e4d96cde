"""Promise: the largest stage of a pipeline is as small as possible, and the stages in a row are the model."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.errors import UsageError
from common.models.causal_lm import with_losses
from common.parallel.stages import check_stages, layer_bounds


def small_model(kind: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, num_hidden_layers=3, head_dim=8, **shape, **tokens, **options)
    return with_losses(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma", "mixtral", "granite"])
def test_stages_in_a_row_are_the_model(kind: str) -> None:
    model = small_model(kind)
    names, modules = list(model.state_dict()), list(model.modules())
    check_stages(model, 3)
    assert list(model.state_dict()) == names and set(model.modules()) == set(modules) and model.training


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("granite", {"embedding_multiplier": 12.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {}),
        ("gemma2", {}),
    ],
)
def test_model_that_a_pipeline_would_change_is_refused(kind: str, options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="outside its layers, which a pipeline cannot divide"):
        check_stages(small_model(kind, **options), 2)


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
