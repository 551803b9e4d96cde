"""Train a small language model: a Llama-style decoder from scratch, or a pretrained model of transformers.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/transformer.py

The default text is on every machine: the source code of Python's standard library. Tokens are bytes.
The model has 0.8 M weights and trains for 2,000 steps, a minute or two on two CPU cores. It then
generates a sample. To train on your own text, or to continue from your own model:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/transformer.py --data path/to/file.txt
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/transformer.py --data path/to/file.txt \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-5
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common import RunConfig, Schedule, UsageError, fit, flag, parameter_groups, run, start
from common.data import Batch
from common.data.text import load_tokens
from common.models.causal_lm import byte_tokenizer, flops_per_sample, load_pretrained, with_losses


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "stdlib"
    max_steps: int | None = 2000
    batch_size: int = 12
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    lr_schedule: Schedule = "cosine"
    weight_decay: float = 0.1
    log_every: int = 100
    eval_every: int | None = 1000
    context: int = flag(64, "tokens per sample", minimum=1)
    num_layers: int = flag(4, "decoder layers", minimum=1)
    num_heads: int = flag(4, "attention heads; --hidden_size must be a multiple of twice this number", minimum=1)
    hidden_size: int = flag(128, "width of the model", minimum=2)
    attention: Literal["sdpa", "eager", "flash_attention_2"] = flag("sdpa", "implementation of attention")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")
    model_name_or_path: str | None = flag(None, "continue from this causal model and its tokenizer (folder or Hub id)")
    sample_tokens: int = flag(200, "tokens that the exported model generates after training", minimum=0)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of each example: the mean over its tokens."""
    return {"loss": model(batch["tokens"], batch["labels"])}


def summarize(means: dict[str, float]) -> dict[str, float]:
    """Adds the perplexity to the mean metrics of an evaluation."""
    return means | {"perplexity": math.exp(min(means["loss"], 700))}


def build(config: Config) -> tuple[PreTrainedModel, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    if config.model_name_or_path is None:
        if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 2:
            raise UsageError(
                f"--hidden_size {config.hidden_size} does not divide into {config.num_heads} heads of even width: "
                f"type --hidden_size {max(2, round(config.hidden_size / config.num_heads / 2) * 2) * config.num_heads}"
            )
        shape = LlamaConfig(
            vocab_size=256,
            hidden_size=config.hidden_size,
            intermediate_size=-(-config.hidden_size * 8 // 3 // 32) * 32,  # Llama's 8/3, rounded up to a multiple of 32
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=config.attention,
        )
        return LlamaForCausalLM(shape), byte_tokenizer()
    return load_pretrained(config.model_name_or_path, config.context, config.attention)


def write_sample(config: Config, tokenizer: Any, prompt: Tensor) -> None:
    """Exports the tokenizer. Prints a sample that the exported model generates from `prompt`, shape (tokens,)."""
    folder = Path(config.output_dir) / "model"
    tokenizer.save_pretrained(folder)
    if config.sample_tokens == 0:
        return
    model, text = AutoModelForCausalLM.from_pretrained(folder), prompt
    while len(text) < len(prompt) + config.sample_tokens:
        seen = text[-max(1, config.context // 2) :].unsqueeze(0)
        new = model.generate(seen, attention_mask=torch.ones_like(seen), max_length=config.context + 1, do_sample=True)
        text = torch.cat([text, new[0, seen.shape[1] :]])
    print(AutoTokenizer.from_pretrained(folder).decode(text))


def main(config: Config) -> None:
    """Trains, then prints a sample that the exported model generates."""
    disable_progress_bar()
    accelerator = start(config)
    model, tokenizer = build(config)
    train_set, eval_set = load_tokens(config.data, tokenizer, config.context)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    groups = parameter_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, config.learning_rate, betas=(0.9, 0.99))
    fit(
        accelerator,
        with_losses(model),
        optimizer,
        forward_step,
        train_set,
        eval_set,
        config,
        summarize,
        tokens_per_sample=config.context,
        flops_per_sample=flops_per_sample(model, config.context),
    )
    prompt = eval_set.tokens[: max(1, config.context // 2)].long()
    accelerator.on_main_process(write_sample)(config, tokenizer, prompt)


if __name__ == "__main__":
    run(main, Config)
