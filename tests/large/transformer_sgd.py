"""recipes/transformer.py with plain SGD, which keeps nothing beside weights and gradients: a billion weights fit."""

import sys
from pathlib import Path

import torch

from accelerate_recipes import fit, run, start
from accelerate_recipes.common.tasks.models.causal_lm import with_losses
from accelerate_recipes.common.tasks.nlp.text import load_tokens

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
from transformer import Config, build, forward_step


def main(config: Config) -> None:
    accelerator = start(config)
    model, tokenizer = build(config)
    text = load_tokens(config.data, tokenizer, config.context, config.max_samples)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    fit(accelerator, with_losses(model), optimizer, forward_step, *text, config)


if __name__ == "__main__":
    run(main, Config)
