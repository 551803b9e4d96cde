"""Models whose speed others have published, for a plan. The weights are random: a plan needs no memory for them.

accelerate-recipes plan benchmarks/llama.py --config fsdp2_bf16 --num_processes 8 --gpu h100 -- --batch_size 16
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from common import RunConfig, fit, flag, run, start
from common.data.batches import Batch
from common.tasks.causal_lm import checkpoint_activations, flops_per_sample, with_losses

# hidden and intermediate size, layers, heads, key-value heads, vocabulary
SIZES = {
    "7b": (4096, 16384, 32, 32, 32, 50368),  # MPT, whose layers have two matrices where Llama's have three: see shape
    "8b": (4096, 14336, 32, 32, 8, 128256),  # Llama 3.1
    "70b": (8192, 28672, 80, 64, 8, 128256),
}


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 16
    max_steps: int | None = 1000
    context: int = flag(8192, "tokens per sample", minimum=2)
    size: Literal["7b", "8b", "70b"] = flag("8b", "number of weights")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")


class Tokens(Dataset):
    """The same tokens again and again."""

    def __init__(self, context: int):
        self.tokens = torch.arange(context)

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens, "labels": self.tokens}


def build(config: Config) -> nn.Module:
    hidden, intermediate, layers, heads, shared, vocabulary = SIZES[config.size]
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate * 2 // 3 if config.size == "7b" else intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=config.context,
    )
    return LlamaForCausalLM(shape)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["labels"])}


def main(config: Config) -> None:
    accelerator = start(config)
    model, samples = build(config), Tokens(config.context)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens, operations = config.context, flops_per_sample(model, config.context)
    data = accelerator, with_losses(model), optimizer, forward_step, samples, samples, config
    fit(*data, tokens_per_sample=tokens, flops_per_sample=operations)


if __name__ == "__main__":
    run(main, Config)
