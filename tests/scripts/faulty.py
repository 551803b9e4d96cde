"""A small Llama, of which one module or weight is wrong in process 1 alone. The flags choose where and how.

faulty.py --fault backward --module model.layers.1.mlp.down_proj
"""

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data.sets import Batch
from accelerate_recipes.common.tasks.models.causal_lm import with_losses
from accelerate_recipes.common.weights.shards import local

IS_WRONG = os.environ.get("RANK") == "1"  # the main process takes the steps of one process


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    max_steps: int | None = 4
    fault: Literal["none", "forward", "one_sample", "backward", "gradient", "gradients", "update", "loss", "scale"] = (
        flag("none", "what is wrong")
    )
    module: str = flag("model.layers.1.mlp.down_proj", "the module; of a gradient or an update, the weight")
    by: float = flag(1.01, "the factor")
    hidden: int = flag(64, "size of the hidden states")


class Scale(torch.autograd.Function):
    """The same values, and a gradient that is multiplied."""

    @staticmethod
    def forward(context: Any, values: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * context.factor, None


class Tokens:
    """64 samples of 16 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(128, (16,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens, "labels": tokens}


def plant(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Makes a module, or a weight, wrong in this process."""
    if config.fault == "forward":
        model.get_submodule(config.module).register_forward_hook(lambda module, args, output: output * config.by)
    elif config.fault == "one_sample":  # the third of a micro-batch
        factors = torch.tensor([1.0, 1.0, config.by, 1.0])[:, None, None]
        model.get_submodule(config.module).register_forward_hook(lambda module, args, output: output * factors)
    elif config.fault == "backward":  # of the gradient that it gives back
        module = model.get_submodule(config.module)
        module.register_forward_pre_hook(lambda module, args: (Scale.apply(args[0], config.by), *args[1:]))
    elif config.fault == "gradient":
        model.get_parameter(config.module).register_hook(lambda gradient: gradient * config.by)
    elif config.fault == "gradients":  # as where a sum is taken for a mean
        for weight in model.parameters():
            weight.register_hook(lambda gradient: gradient * (2 if dist.is_initialized() else 1))
    elif config.fault == "update":

        def change(*args: Any) -> None:
            with torch.no_grad():
                local(model.get_parameter(config.module)).mul_(config.by)

        optimizer.register_step_post_hook(change)


def main(config: Config) -> None:
    accelerator = start(config)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128,
        hidden_size=config.hidden,
        intermediate_size=2 * config.hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = with_losses(LlamaForCausalLM(shape))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if IS_WRONG or config.fault == "gradients":
        plant(model, optimizer, config)

    def forward_step(given: nn.Module, batch: Batch) -> dict[str, Tensor]:
        factor = config.by if IS_WRONG and config.fault == "loss" else 1
        losses = given(batch["tokens"], batch["labels"]) * factor
        if config.fault == "scale" and dist.is_initialized():  # of the gradient, in all processes
            losses = Scale.apply(losses, config.by)
        return {"loss": losses}

    fit(accelerator, model, optimizer, forward_step, Tokens(), Tokens(), config)


if __name__ == "__main__":
    run(main, Config)
