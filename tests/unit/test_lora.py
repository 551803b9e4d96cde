"""Promise: `--lora_targets` takes any layer that PEFT adapts, and PEFT loads what a run exports."""

import copy
import json
import re
import warnings
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.chat.chat_models import ChatFlags, load_chat_model, small_chat_model
from accelerate_recipes.common.tasks.models.causal_lm import load_pretrained, with_losses
from accelerate_recipes.common.tasks.models.lora import LoraFlags, base_of, with_adapters
from accelerate_recipes.common.weights.shards import checkpoint_tensors

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


def adapt(model: PreTrainedModel, **flags: Any) -> Any:
    return with_adapters(with_losses(model), LoraFlags(model_name_or_path="base", lora_rank=4, **flags))


def go_on(model: PreTrainedModel, folder: Path) -> Any:
    return with_adapters(with_losses(model), LoraFlags(model_name_or_path=str(folder)))


@pytest.mark.parametrize(
    ("make", "targets", "number"),
    [
        (gpt2, "all-linear", 8),
        (gpt2, "c_attn,c_fc", 4),
        (gpt2, "c_attn,wpe", 3),  # an embedding, whose adapters PEFT names in another way
        (llama, "all-linear", 14),
        (llama, "q_proj,embed_tokens", 3),
        (llama, r".*\.1\.self_attn\.[qv]_proj", 2),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT's, when it loads Conv1D
def test_adapters_load_with_peft(tmp_path: Path, make: type, targets: str, number: int) -> None:
    model = make()
    plain = copy.deepcopy(model)
    adapted = adapt(model, lora_targets=targets, lora_alpha=3, lora_dropout=0.5)
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * number and all("lora" in name for name in trained)
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(std=0.3)
        expected = type(plain).forward(adapted.eval().get_base_model(), TOKENS).logits
        drawn = type(plain).forward(adapted.train().get_base_model(), TOKENS).logits
        assert not torch.allclose(drawn, expected, atol=1e-3)
    adapter = adapted.peft_adapter
    adapter.write({name: weight.detach() for name, weight in trained.items()}, tmp_path)
    adapter.write_settings(adapted, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["lora_alpha"] == 3 and written["lora_dropout"] == 0.5
    before = plain(TOKENS).logits
    loaded = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    found = loaded(TOKENS).logits
    assert torch.allclose(found, expected, atol=1e-6) and not torch.allclose(found, before, atol=1e-2)
    again = adapter.read(tmp_path, [*trained])
    assert again.keys() == trained.keys() and all(torch.equal(again[name], trained[name]) for name in again)


def test_frozen_adapters_are_exported_and_go_on(tmp_path: Path) -> None:
    """LLaVA does not use the last layer of its vision encoder, so the recipe freezes it, with its adapters."""
    adapted = adapt(llama())
    for name, weight in adapted.named_parameters():
        weight.requires_grad_(weight.requires_grad and ".layers.0." in name)
    written = {name: weight.detach() for name, weight in checkpoint_tensors(adapted).items()}
    assert len(written) == 2 * 14 and all("lora" in name for name in written)
    adapted.peft_adapter.write(written, tmp_path)
    adapted.peft_adapter.write_settings(adapted, tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*missing adapter keys")  # PEFT's, for adapters that the file lacks
        PeftModel.from_pretrained(llama(), str(tmp_path))
    assert all(torch.equal(checkpoint_tensors(go_on(llama(), tmp_path))[name], written[name]) for name in written)


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
        (".*q_proj", r"no layer .\*q_proj .the head does not count.; use all-linear, or some of c_attn"),
        (".*(c_attn|lm_head)", r"no layer .\*.c_attn.lm_head. .the head does not count."),
        ("c_attn|(", "no regular expression .*; use all-linear"),
    ],
)
def test_layers_that_cannot_be_adapted(targets: str, line: str) -> None:
    with pytest.raises(UsageError, match=f"--lora_targets {re.escape(targets)}: .*{line}"):
        adapt(gpt2(), lora_targets=targets)


def prompts_of_peft(folder: Path) -> None:
    get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(
        str(folder)
    )


def of_peft(folder: Path, save_embedding_layers: bool | str = "auto", **more: Any) -> PeftModel:
    """Adapters that PEFT has written."""
    settings = LoraConfig(r=4, lora_alpha=5, target_modules=r".*\.(q_proj|down_proj)", init_lora_weights=False, **more)
    made = get_peft_model(llama(), settings)
    made.peft_config["default"].base_model_name_or_path = "base"
    made.save_pretrained(str(folder), save_embedding_layers=save_embedding_layers)
    return made.eval()


def test_adapters_of_peft_go_on(tmp_path: Path) -> None:
    expected = of_peft(tmp_path)(TOKENS).logits
    assert base_of(LoraFlags(model_name_or_path=str(tmp_path))) == "base"
    base = llama()
    adapted = go_on(base, tmp_path).eval()
    assert torch.allclose(type(base).forward(base, TOKENS).logits, expected, atol=1e-6)
    assert {name.rpartition(".lora_")[2] for name, weight in adapted.named_parameters() if weight.requires_grad} == {
        "A.default.weight",
        "B.default.weight",
    }
    adapter = adapted.peft_adapter
    assert adapter.settings.base_model_name_or_path == "base" and adapter.settings.lora_alpha == 5
    (tmp_path / "base").mkdir()
    with chdir(tmp_path):  # PEFT's files may name their base from where they were made; the export lies elsewhere
        assert go_on(llama(), tmp_path).peft_adapter.settings.base_model_name_or_path == str(tmp_path / "base")
    assert adapter.start_digest != adapter.base_digest == adapt(llama()).peft_adapter.start_digest


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda folder: of_peft(folder, modules_to_save=["norm"]), "has more than the matrices of LoRA"),
        (
            lambda folder: of_peft(folder, save_embedding_layers=True),
            r"has more weights .* such as base_model.*lm_head\.weight: merge it with PEFT",
        ),
        (lambda folder: prompts_of_peft(folder), "has trained prompts, which are not supported: use LoRA adapters"),
        (lambda folder: of_peft(folder, use_dora=True), "is DoRA, not plain LoRA: merge it with PEFT"),
        (lambda folder: (of_peft(folder), (folder / "adapter_model.safetensors").unlink()), "no adapters of Llama"),
        (
            lambda folder: (of_peft(folder), save_file({}, folder / "adapter_model.safetensors")),
            "its weights do not match",
        ),
        (
            lambda folder: (
                of_peft(folder),
                (folder / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            ),
            "adapter_model.safetensors is a Git LFS pointer, not the file itself: run git lfs pull",
        ),
        (
            lambda folder: (of_peft(folder), save_file({}, folder / "adapter_model.safetensors", {"base": "other"})),
            "belongs to base other, but this run has",
        ),
    ],
)
def test_adapters_that_cannot_go_on(tmp_path: Path, spoil: Any, line: str) -> None:
    spoil(tmp_path)
    with pytest.raises(UsageError, match=line):
        go_on(llama(), tmp_path)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"lora_dropout": 0.1}, "--lora_dropout adapts a pretrained model: use --model_name_or_path, too"),
        ({"lora_alpha": 8, "model_name_or_path": "base"}, "--lora_alpha is for adapters: use --lora_rank, too"),
        (
            {"lora_rank": 8, "model_name_or_path": "HERE"},
            "--lora_rank: the run continues the adapters in .*: remove it",
        ),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, flags: dict[str, Any], line: str) -> None:
    of_peft(tmp_path)
    flags = {name: str(tmp_path) if value == "HERE" else value for name, value in flags.items()}
    with pytest.raises(UsageError, match=line):
        base_of(LoraFlags(**flags))


def test_adapters_are_no_model(tmp_path: Path) -> None:
    of_peft(tmp_path)
    with pytest.raises(UsageError, match="it holds adapters, not a model: merge them with PEFT, and use the path of"):
        load_pretrained(str(tmp_path), 16, "sdpa")


def test_adapters_come_without_a_warning(tmp_path: Path) -> None:
    of_peft(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt(llama())
        go_on(llama(), tmp_path)


def test_base_that_has_moved_is_looked_for_in_its_file(tmp_path: Path) -> None:
    of_peft(tmp_path)
    for base in ("/home/somebody/base", "models/base", "nobody/base"):
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
        config = ChatFlags(model_name_or_path=str(tmp_path))
        line = f"--model_name_or_path {base}: .*; base_model_name_or_path in {file} names it: correct it there"
        with pytest.raises(UsageError, match=line):
            load_chat_model(config, small_chat_model)
