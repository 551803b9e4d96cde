"""A language model of 10 million weights on random tokens: what benchmarks/memory.py measures and a plan predicts.

accelerate-recipes plan benchmarks/small_llama.py --config fsdp2
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from common import RunConfig, fit, flag, run, start
from common.data.batches import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    max_steps: int | None = 3
    context: int = flag(16, "tokens per sample", minimum=2)


class Tokens(Dataset):
    """Random samples of `context` tokens."""

    def __init__(self, context: int):
        self.tokens = torch.randint(0, 1024, (64, context), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 2**16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"tokens": tokens, "labels": tokens}


def build(context: int) -> nn.Module:
    """A Llama with two matrices for embedding and head, so that tensor parallelism can divide both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.tasks.causal_lm import with_losses

    shape = LlamaConfig(
        vocab_size=1024,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=8,
        max_position_embeddings=context,
    )
    return with_losses(LlamaForCausalLM(shape))


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["labels"])}


def main(config: Config) -> None:
    accelerator = start(config)
    model, samples = build(config.context), Tokens(config.context)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fit(accelerator, model, optimizer, forward_step, samples, samples, config, tokens_per_sample=config.context)


if __name__ == "__main__":
    run(main, Config)
