"""A small causal model, with one error planted. `--fault ""` trains it without.

accelerate launch --config_file accelerate_configs/ddp.yaml benchmarks/silent_errors/recipe.py --fault late_element
"""

from dataclasses import dataclass
from typing import Any, Literal

import framework  # noqa: F401  # fills FAULTS
import mistakes  # noqa: F401
import torch
from faults import FAULTS, Parts
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig, Qwen3Config

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data.sets import Batch
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, with_losses

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),  # it has norms of heads
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    learning_rate: float = 1e-3
    max_steps: int | None = 12
    log_every: int = 2
    eval_every: int | None = 6
    fault: Literal["", *FAULTS] = flag("", "which error to plant")  # type: ignore[valid-type]
    model: Literal["llama", "qwen3", "mixtral"] = flag("llama", "which model of transformers")
    tied: bool = flag(False, "the head shares the weight of the embedding")
    hidden: int = flag(32, "width of the model; 768 with --layers 12 and --vocabulary 32000 has 134 million weights")
    layers: int = flag(2, "number of layers")
    vocabulary: int = flag(64, "number of tokens")
    context: int = flag(16, "tokens of a sample")


class Tokens:
    """Arithmetic sequences with some noise, of several lengths."""

    def __init__(self, number: int, first: int, config: Config):
        self.number, self.first, self.context, self.vocabulary = number, first, config.context, config.vocabulary

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(self.first + index)
        start, step, length = torch.randint(1, self.context // 2, (3,), generator=draws).tolist()
        tokens = (start + step * torch.arange(self.context)) % self.vocabulary
        noise = torch.randint(self.vocabulary, (self.context,), generator=draws)
        tokens = tokens.where(torch.rand(self.context, generator=draws) < 0.8, noise)
        labels = tokens.roll(-1)
        labels[self.context - length :] = IGNORED
        return {"tokens": tokens, "labels": labels, "weight": (labels != IGNORED).sum().float()}


def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["labels"])}


def build(config: Config) -> nn.Module:
    kind, more = KINDS[config.model]
    shape = kind(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=config.layers,
        num_attention_heads=4 if config.hidden < 256 else 12,
        num_key_value_heads=4 if config.hidden < 256 else 12,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
        **more,
    )
    from transformers import AutoModelForCausalLM

    return with_losses(AutoModelForCausalLM.from_config(shape))


def main(config: Config) -> None:
    accelerator = start(config)
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    sets = Tokens(256, 0, config), Tokens(19, 10_000, config)
    parts = Parts(accelerator, config, model, optimizer, forward_step, *sets, {})
    if config.fault and (plant := FAULTS[config.fault].plant):
        plant(parts)
    given = parts.model, parts.optimizer, parts.forward_step, parts.train_set, parts.eval_set
    fit(accelerator, *given, config, **parts.options)


if __name__ == "__main__":
    run(main, Config)
