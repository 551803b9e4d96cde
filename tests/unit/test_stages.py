"""Promise: the stages of a pipeline have about the same number of layers, and each layer is in one of them."""

from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes.common.parallel.chain import Chain, find_chain, layer_bounds
from accelerate_recipes.common.parallel.schedules import SCHEDULES, cost
from accelerate_recipes.common.parallel.stages import Stage


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_stages_differ_by_one_layer_at_most(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        bounds = layer_bounds(num_layers, num_stages)
        lengths = [end - start for start, end in pairwise(bounds)]
        assert bounds[0] == 0 and bounds[-1] == num_layers and len(lengths) == num_stages
        assert max(lengths) - min(lengths) <= 1 and lengths[-1] == min(lengths)


CPU = torch.device("cpu")


def stage_of(index: int) -> tuple[Stage, Chain]:
    """A stage of two, of a Llama with tied embeddings and a buffer, and the chain of the model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=3, **sizes))
    model.register_buffer("scale", torch.ones(1))
    tokens = torch.arange(4).unsqueeze(0)
    with torch.no_grad():
        chain = find_chain(model, lambda: model(tokens, use_cache=False).logits, CPU)
    stage = Stage(model, chain, layer_bounds(3, 2), index, CPU)
    stage.run = lambda model: model(tokens, use_cache=False).logits
    return stage, chain


def test_stages_hold_what_they_use_and_compute_what_the_model_does() -> None:
    (first, chain), (last, _) = stage_of(0), stage_of(1)
    whole = LlamaForCausalLM(first.model.config)
    names = [{*stage.model.state_dict()} for stage in (first, last)]
    assert names[0] & names[1] == {"model.embed_tokens.weight", "lm_head.weight"}  # which are tied
    assert names[0] | names[1] == {*whole.state_dict(), "scale"} and "scale" in names[0]
    assert chain.stages_of("lm_head.weight", layer_bounds(3, 2)) == {0, 1}
    whole.load_state_dict({**first.model.state_dict(), **last.model.state_dict()}, strict=False)
    with torch.no_grad():
        hidden = first(torch.empty(0))
        assert last(hidden).equal(last.run(whole)) and not last(hidden + 1).equal(last.run(whole))


@pytest.mark.parametrize("size", [2, 4])
def test_cost_of_schedules_is_that_of_the_formulas(size: int) -> None:
    """Of Narayanan et al. 2021 for v stages in a process: (S - 1) / (v M + S - 1)."""
    for number in (size, 2 * size, 8 * size):
        for name, stages in (("1f1b", 1), ("interleaved", 2)):
            assert cost(name, size, number).idle == pytest.approx((size - 1) / (stages * number + size - 1))
        assert cost("1f1b", size, number).live == [*range(size, 0, -1)]
        assert cost("zbv", size, number).idle < cost("interleaved", size, number).idle
    assert {*SCHEDULES} == {"1f1b", "interleaved", "zbv"}
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        cost("interleaved", size, 2 * size + 1)
