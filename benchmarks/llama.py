"""Llamas of many sizes with random weights on random tokens: for measurements, and for plans, which need no memory for
the weights.

accelerate-recipes plan benchmarks/llama.py --config fsdp2_bf16 --num_processes 8 --gpu h100 -- --batch_size 16
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data.sets import Batch
from accelerate_recipes.common.tasks.models.causal_lm import checkpoint_activations, flops_per_sample, with_losses

# hidden and intermediate size, layers, heads, key-value heads, vocabulary
SIZES = {
    "100k": (64, 128, 2, 4, 4, 256),  # for short runs, to see that a script runs
    "10m": (384, 1024, 5, 8, 8, 1024),
    "134m": (768, 2048, 12, 12, 12, 32000),
    "300m": (1024, 4096, 15, 16, 8, 32000),
    "1b": (2048, 8192, 16, 32, 8, 16000),
    "7b": (4096, 16384, 32, 32, 32, 50368),  # MPT, whose layers have two matrices where Llama's have three
    "8b": (4096, 14336, 32, 32, 8, 128256),  # Llama 3.1
    "70b": (8192, 28672, 80, 64, 8, 128256),
}


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 16
    max_steps: int | None = 1000
    context: int = flag(8192, "tokens per sample", minimum=2)
    size: Literal["100k", "10m", "134m", "300m", "1b", "7b", "8b", "70b"] = flag("8b", "number of weights")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")


class Tokens(Dataset):
    """Random samples of `context` tokens, again and again."""

    def __init__(self, context: int, vocabulary: int):
        self.tokens = torch.randint(vocabulary, (64, context), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"tokens": tokens, "labels": tokens}


def build(size: str, context: int) -> nn.Module:
    hidden, intermediate, layers, heads, shared, vocabulary = SIZES[size]
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate * 2 // 3 if size == "7b" else intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=context,
    )
    return LlamaForCausalLM(shape)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["labels"])}


def main(config: Config) -> None:
    accelerator = start(config)
    model, samples = build(config.size, config.context), Tokens(config.context, SIZES[config.size][-1])
    if config.activation_checkpointing:
        checkpoint_activations(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens, operations = config.context, flops_per_sample(model, config.context)
    # The first samples are enough for the evaluation at the end.
    few = torch.utils.data.Subset(samples, range(config.batch_size))
    data = accelerator, with_losses(model), optimizer, forward_step, samples, few, config
    fit(*data, tokens_per_sample=tokens, flops_per_sample=operations)


if __name__ == "__main__":
    run(main, Config)
