"""Promise: a tp_plan that does not fit the model is refused."""

from typing import Any

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.parallel.tensor_plan import check_plan, has_plan
from accelerate_recipes.common.tasks.lora import LoraFlags, with_adapters


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
    assert check_plan(Net(**plan), 4) == {
        "layers.0.1": "colwise",
        "layers.1.1": "colwise",
        "head": "colwise_rep",
        "embedding": "embedding_rowwise",
    }


@pytest.mark.parametrize(
    ("net", "size", "expected"),
    [
        (Net(), 2, "Net has no tp_plan"),
        (Net(layer="colwise"), 2, "tp_plan: layer names no module of Net"),
        (Net(head="diagonal"), 2, "tp_plan: head: diagonal: expected one of colwise, rowwise"),
        (Net(**{"layers_*_0": "colwise"}), 2, r"layers.0.0 is 9 wide, which is not divisible by tp_size 2"),
        (Net(**{"layers_*_1": "rowwise"}), 2, r"layers.0.1 is 9 wide"),
        (Net(embedding="embedding_rowwise"), 5, "embedding is 12 wide"),
        (Net(**{"layers_0": "colwise"}), 2, r"layers.0 is Sequential: expected Linear or Embedding"),
        (Net(tied=True, head="colwise"), 2, "head shares its weight with embedding"),
        (with_weight_norm("head"), 2, "head computes its weight from parametrizations.weight.original0"),
    ],
)
def test_plan_that_does_not_fit(net: Net, size: int, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        check_plan(net, size)


def llama(**changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **(shape | changes)))


def test_transformers_models_bring_their_plan() -> None:
    untied = check_plan(llama(), 2)
    assert untied["model.layers.0.self_attn.q_proj"] == "colwise"
    ends = {"lm_head", "model.embed_tokens"} & untied.keys()  # transformers 5.0 leaves them whole
    assert untied.get("lm_head", "colwise_rep") in ("colwise_gather_output", "colwise_rep")  # two names for one style
    assert untied.keys() - check_plan(llama(tie_word_embeddings=True), 2).keys() == ends
    with pytest.raises(UsageError, match="num_attention_heads is 6, which is not divisible by tp_size 4"):
        check_plan(llama(), 4)
    with pytest.raises(UsageError, match="num_key_value_heads is 3, which is not divisible by tp_size 2"):
        check_plan(llama(num_key_value_heads=3), 2)


def test_norms_of_heads_stay_whole() -> None:
    """Qwen3 has a norm for the queries of each head, which each process takes of its own heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, num_attention_heads=2, num_key_value_heads=2, **shape))
    plan = check_plan(model, 2)
    norms = [plan.get(f"model.layers.0.self_attn.{name}_norm") for name in "qk"]
    assert norms == ["replicated_with_grad_allreduce"] * 2


def adapt(model: Any, rank: int, targets: str) -> nn.Module:
    return with_adapters(model, LoraFlags(model_name_or_path="base", lora_rank=rank, lora_targets=targets))


def test_adapters_are_divided_with_their_layers() -> None:
    """Of B(A(x)), a colwise layer divides B and a rowwise layer A. Layers without adapters keep their style."""
    model = adapt(llama(), 3, "q_proj,down_proj")
    layer = "base_model.model.model.layers.0"
    plan = {name.removeprefix(f"{layer}."): style for name, style in check_plan(model, 2).items() if layer in name}
    assert plan == {
        "self_attn.q_proj.base_layer": "colwise",
        "self_attn.q_proj.lora_B.default": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj.base_layer": "rowwise",
        "mlp.down_proj.lora_A.default": "rowwise",
    }
    with pytest.raises(UsageError, match="num_attention_heads is 6, which is not divisible by tp_size 4"):
        check_plan(model, 4)
    with pytest.raises(UsageError, match=r"gate_proj\.base_layer is 33 wide, which is not divisible by tp_size 2"):
        check_plan(adapt(llama(intermediate_size=33), 2, "gate_proj"), 2)


def test_adapters_of_a_stranger_are_divided_with_their_layers() -> None:
    """PEFT passes on the plan of the model in it, which names the layers as they were before."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    plan = check_plan(get_peft_model(llama(), LoraConfig(target_modules=["q_proj"])), 2)
    layer = "base_model.model.model.layers.0"
    assert plan[f"{layer}.self_attn.q_proj.lora_B.default"] == plan[f"{layer}.mlp.up_proj"] == "colwise"
    prompted = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert check_plan(prompted, 2)["base_model.model.layers.0.mlp.up_proj"] == "colwise"
    kept = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], modules_to_save=["up_proj"]))
    with pytest.raises(UsageError, match="up_proj is ModulesToSaveWrapper: expected Linear or Embedding: leave it out"):
        check_plan(kept, 2)


def test_adapters_with_other_weights_are_refused() -> None:
    """DoRA computes the norm of each row of a weight."""
    from peft import IA3Config, LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(target_modules="all-linear", use_dora=True))
    with pytest.raises(
        UsageError, match=r"does not divide lora_magnitude_vector of base_model.*q_proj: use plain LoRA"
    ):
        check_plan(model, 2)
    with pytest.raises(UsageError, match=r"does not divide ia3_l of base_model.*k_proj: use plain LoRA"):
        check_plan(get_peft_model(llama(), IA3Config(task_type="CAUSAL_LM")), 2)


def test_layers_of_gpt2_may_be_in_a_plan() -> None:
    """Its Conv1D has its weight the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    with pytest.raises(UsageError, match="GPT2LMHeadModel has no tp_plan"):
        check_plan(model, 2)
    model.tp_plan = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
    assert check_plan(model, 2) == {"transformer.h.0.mlp.c_fc": "colwise", "transformer.h.0.mlp.c_proj": "rowwise"}


def test_plans_of_experts_name_their_weights() -> None:
    """The module around them has a style of its own; it stays whole if a process can hold only one range of a weight,
    and experts of another form always do."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, num_local_experts=2, **shape))
    assert has_plan(model) and check_plan(model, 2)["model.layers.0.mlp.experts"] == "moe_tp_experts"
    plan = check_plan(model, 2, packs=False)
    assert plan["model.layers.0.self_attn.q_proj"] == "colwise" and not any("experts" in name for name in plan)
    model.tp_plan = dict(model.tp_plan) | {"model.layers.*.mlp.experts.gate_up_proj": "packed_rowwise"}
    assert has_plan(model) and not any("experts" in name for name in check_plan(model, 2))


def test_plan_with_another_style_of_transformers_is_not_used() -> None:
    """It names the other half of a pair, too. A word that is no style is the user's mistake."""
    assert not has_plan(Net()) and not has_plan(Net(layers_0="local_params", head="colwise"))
    assert has_plan(Net(head="diagonal")) and check_plan(Net(embedding="replicate", head="colwise"), 2) == {
        "head": "colwise"
    }
