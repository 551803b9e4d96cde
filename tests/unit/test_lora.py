"""Promise: `--lora_targets` takes any layer that PEFT adapts, and PEFT loads what a run exports."""

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.causal_lm import with_losses
from accelerate_recipes.common.tasks.lora import add_lora

TOKENS = torch.arange(3, 40).unsqueeze(0)


def gpt2() -> PreTrainedModel:
    """Its layers are Conv1D."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    ).eval()


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


@pytest.mark.parametrize(
    ("make", "targets", "number"),
    [
        (gpt2, "all-linear", 8),
        (gpt2, "c_attn,c_fc", 4),
        (gpt2, "c_attn,wpe", 3),  # an embedding, whose adapters PEFT names in another way
        (llama, "all-linear", 14),
        (llama, "q_proj,embed_tokens", 3),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT's, when it loads Conv1D
def test_adapters_load_with_peft(tmp_path: Path, make: type, targets: str, number: int) -> None:
    model = make()
    plain = copy.deepcopy(model)
    adapted = add_lora(with_losses(model), 4, targets, "base")
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * number and all("lora" in name for name in trained)
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(std=0.3)
        expected = type(plain).forward(adapted.get_base_model(), TOKENS).logits
    adapter = adapted.peft_adapter
    adapter.write({name: weight.detach() for name, weight in trained.items()}, tmp_path)
    adapter.settings.save_pretrained(str(tmp_path))
    before = plain(TOKENS).logits
    loaded = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    found = loaded(TOKENS).logits
    assert torch.allclose(found, expected, atol=1e-6) and not torch.allclose(found, before, atol=1e-2)
    again = adapter.read(tmp_path, [*trained])
    assert again.keys() == trained.keys() and all(torch.equal(again[name], trained[name]) for name in again)


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (
            "c_attn,q_proj",
            "no layer q_proj .the head.*; use all-linear, or some of c_attn,c_fc,c_proj,wpe,wte",
        ),
        ("lm_head", "no layer lm_head .the head does not count.; use all-linear"),
        ("", "use all-linear, or some of c_attn"),
        ("c_attn,ln_1", "LayerNorm.* is not supported.*; use all-linear, or some of c_attn"),
    ],
)
def test_layers_that_cannot_be_adapted(targets: str, line: str) -> None:
    with pytest.raises(UsageError, match=f"--lora_targets {targets}: .*{line}"):
        add_lora(with_losses(gpt2()), 4, targets, "base")
