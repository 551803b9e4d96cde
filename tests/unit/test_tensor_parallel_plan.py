"""Promise: a tp_plan that does not fit the model is not used."""

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from accelerate_recipes.common.parallel.tensor_plan import shipped_plan
from accelerate_recipes.common.tasks.models.lora import LoraFlags, with_adapters


class Net(nn.Module):
    def __init__(self, tied: bool = False, **plan: str):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.tp_plan = {name.replace("_", "."): style for name, style in plan.items()}


def with_weight_norm(name: str) -> nn.Module:
    net = Net(**{name: "colwise"})
    weight_norm(net.get_submodule(name))
    return net


def test_plan_names_modules_with_a_star_for_numbers() -> None:
    plan = {"layers_*_1": "colwise", "head": "colwise_rep", "embedding": "embedding_rowwise"}
    expected = {
        "layers.0.1": "colwise",
        "layers.1.1": "colwise",
        "head": "colwise_rep",
        "embedding": "embedding_rowwise",
    }
    assert shipped_plan(Net(**plan), 4) == (expected, "")
    assert shipped_plan(Net(embedding="replicate", head="colwise"), 4) == ({"head": "colwise"}, "")
    assert shipped_plan(Net(tied=True, **plan), 4)[0].keys() == {"layers.0.1", "layers.1.1"}  # tied layers stay whole


@pytest.mark.parametrize(
    ("net", "size", "expected"),
    [
        (Net(), 2, "Net has no tp_plan"),
        (Net(layer="colwise"), 2, "layer is not a module"),
        (Net(head="diagonal"), 2, "head: diagonal is not supported"),
        (Net(layers_0="local_params", head="colwise"), 2, "layers.0: local_params is not supported"),
        (Net(**{"layers_*_0": "colwise"}), 2, "layers.0.0 is 9 wide, which is not divisible by tp_size 2"),
        (Net(**{"layers_*_1": "rowwise"}), 2, "layers.0.1 is 9 wide"),
        (Net(embedding="embedding_rowwise"), 5, "embedding is 12 wide"),
        (Net(**{"layers_0": "colwise"}), 2, "layers.0 is not a plain Linear or Embedding"),
        (Net(tied=True, head="colwise"), 2, "head shares its weight with another layer"),
        (Net(tied=True, head="colwise_rep"), 2, "it names no layers"),
        (with_weight_norm("head"), 2, "head is not a plain Linear or Embedding"),
    ],
)
def test_plan_that_does_not_fit(net: Net, size: int, expected: str) -> None:
    plan, why_not = shipped_plan(net, size)
    assert plan == {} and why_not.startswith("Net has no tp_plan") and expected in why_not


def llama(**changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **(shape | changes)))


def test_transformers_models_bring_their_plan() -> None:
    untied, _ = shipped_plan(llama(), 2)
    assert untied["model.layers.0.self_attn.q_proj"] == "colwise"
    ends = {"lm_head", "model.embed_tokens"} & untied.keys()  # transformers 5.0 leaves them whole
    assert untied.get("lm_head", "colwise_rep") in ("colwise_gather_output", "colwise_rep")  # two names for one style
    assert untied.keys() - shipped_plan(llama(tie_word_embeddings=True), 2)[0].keys() == ends
    assert "num_attention_heads is 6, which is not divisible by tp_size 4" in shipped_plan(llama(), 4)[1]
    grouped = shipped_plan(llama(num_key_value_heads=3), 2)
    assert "num_key_value_heads is 3, which is not divisible by tp_size 2" in grouped[1]
    flags = LoraFlags(model_name_or_path="base", lora_rank=2)
    assert "(it names no layers)" in shipped_plan(with_adapters(llama(), flags), 2)[1]


def test_norms_of_heads_stay_whole() -> None:
    """Qwen3 has a norm for the queries of each head, which each process takes of its own heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, num_attention_heads=2, num_key_value_heads=2, **shape))
    plan, _ = shipped_plan(model, 2)
    norms = [plan.get(f"model.layers.0.self_attn.{name}_norm") for name in "qk"]
    assert norms == ["replicated_with_grad_allreduce"] * 2


def test_layers_of_gpt2_may_be_in_a_plan() -> None:
    """Its Conv1D has its weight the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    assert shipped_plan(model, 2) == ({}, "GPT2LMHeadModel has no tp_plan")
    model.tp_plan = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
    expected = {"transformer.h.0.mlp.c_fc": "colwise", "transformer.h.0.mlp.c_proj": "rowwise"}
    assert shipped_plan(model, 2) == (expected, "")


def test_plans_of_experts_name_their_weights() -> None:
    """The module around them has a style of its own; it stays whole if a process can hold only one range of a weight,
    and experts of another form always do."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, num_local_experts=2, **shape))
    assert shipped_plan(model, 2)[0]["model.layers.0.mlp.experts"] == "moe_tp_experts"
    plan, _ = shipped_plan(model, 2, packs=False)
    assert plan["model.layers.0.self_attn.q_proj"] == "colwise" and not any("experts" in name for name in plan)
    model.tp_plan = dict(model.tp_plan) | {"model.layers.*.mlp.experts.gate_up_proj": "packed_rowwise"}
    plan, _ = shipped_plan(model, 2)
    assert plan and not any("experts" in name for name in plan)
