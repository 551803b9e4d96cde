"""Compares causal models that divide their samples with the same models undivided: losses and gradients.

Prints a line of JSON: {case: [largest relative difference of a loss, of a gradient]}, or the refusal.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

from accelerate_recipes import RunConfig, UsageError, run, start
from accelerate_recipes.common.parallel.grid import Grid
from accelerate_recipes.common.parallel.sequence import SequenceGroup, divider_of
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, checkpoint_activations, with_losses

VOCABULARY, CONTEXT = 64, 24
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **(SIZES | NO_IDS | {"use_cache": False} | options))
    return hf.AutoModelForCausalLM.from_config(config)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": VOCABULARY}
    return model_of("gpt2", **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def checkpointed() -> Any:
    model = model_of("llama", num_key_value_heads=2)
    checkpoint_activations(model)
    return model.train()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = with_losses(model_of("llama", num_key_value_heads=2), chunk=10, longest=CONTEXT)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))


def llama(num_key_value_heads: int = 4, **options: Any) -> Any:
    return model_of("llama", num_key_value_heads=num_key_value_heads, **options)


WINDOW = {"num_key_value_heads": 2, "sliding_window": 5}
# {case: (model, keywords of with_losses, tokens of a sample)}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "llama": (llama, {}, CONTEXT),
    "tied": (lambda: llama(tie_word_embeddings=True), {}, CONTEXT),
    "2 key-value heads": (lambda: llama(2), {}, CONTEXT),
    "1 key-value head": (lambda: llama(1), {}, CONTEXT),
    "a length that does not divide": (llama, {}, CONTEXT - 1),
    "chunks": (llama, {"chunk": 10, "longest": CONTEXT}, CONTEXT - 3),
    "documents": (llama, {"packs": True}, CONTEXT),
    "documents in chunks": (lambda: llama(2), {"packs": True, "chunk": 10, "longest": CONTEXT}, CONTEXT - 1),
    "checkpointed": (checkpointed, {"packs": True}, CONTEXT),
    "adapters": (adapted, {}, CONTEXT),
    "bf16": (lambda: llama(2).bfloat16(), {}, CONTEXT),
    "gpt2": (gpt2, {}, CONTEXT - 1),
    "qwen3": (lambda: model_of("qwen3", num_key_value_heads=2, head_dim=8), {}, CONTEXT),
    "a window": (lambda: model_of("mistral", **WINDOW), {}, CONTEXT),
    "a window over documents": (lambda: model_of("mistral", **WINDOW), {"packs": True}, CONTEXT),
    "windows in some layers": (
        lambda: model_of("gemma3_text", head_dim=8, layer_types=["sliding_attention", "full_attention"], **WINDOW),
        {},
        CONTEXT,
    ),
    "experts": (lambda: model_of("mixtral", num_key_value_heads=2, num_local_experts=4), {}, CONTEXT),
    "opt": (lambda: model_of("opt", ffn_dim=48, dropout=0.0, word_embed_proj_dim=32), {}, CONTEXT),
    "5 heads": (lambda: llama(5, num_attention_heads=5, hidden_size=40), {}, CONTEXT),
    "eager": (lambda: llama(attn_implementation="eager"), {}, CONTEXT),
    "mamba": (lambda: model_of("mamba", state_size=4), {}, CONTEXT),
    "bloom": (lambda: model_of("bloom", n_head=4, n_layer=2), {}, CONTEXT),
}


def batch(length: int, packs: bool) -> dict[str, torch.Tensor]:
    """Two samples: one with prompts and padding that are not trained, one with a single label."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCABULARY, (2, 2, length), generator=generator).unbind()
    labels[0, :5] = labels[0, -4:] = IGNORED
    labels[1, :-1] = IGNORED
    starts = torch.tensor([[0, 7, 13], [0, 3, 20]])
    documents = torch.stack(
        [torch.arange(length) - row[torch.searchsorted(row, torch.arange(length), right=True) - 1] for row in starts]
    )
    return {"tokens": tokens, "labels": labels} | ({"positions": documents} if packs else {})


def gradients(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    losses = model(**given)
    losses.sum().backward()
    return losses.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def compared(build: Callable[[], Any], options: dict[str, Any], length: int, group: SequenceGroup) -> list[float]:
    model, given = build(), batch(length, "packs" in options)
    model = model if hasattr(model, "peft_config") else with_losses(model, **options)
    whole = copy.deepcopy(model)
    divider_of(model, group.size).divide(group)
    losses, found = gradients(model, given)
    expected_losses, expected = gradients(whole, given)
    assert len(found) == len(expected) > 0
    for gradient in found:
        dist.all_reduce(gradient)
    differences = [difference(*pair) for pair in zip(found, expected) if pair[1].norm() > 1e-7]
    return [difference(losses, expected_losses), max(differences)]


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 2


def main(config: Config) -> None:
    accelerator = start(config)
    group, results = SequenceGroup(Grid(accelerator.layout, accelerator.device).mesh["sp"]), {}
    for case, (build, options, length) in CASES.items():
        try:
            results[case] = compared(build, options, length, group)
        except UsageError as error:
            results[case] = str(error)
    accelerator.print(json.dumps(results))


if __name__ == "__main__":
    run(main, Config)
