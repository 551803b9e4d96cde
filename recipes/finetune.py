"""Fine-tune a chat model: prompts masked, conversations packed, all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/finetune.py

Data: small conversations whose answers follow rules; or your own JSON-lines or parquet file, or a Hub id, with a column
of messages, or with the columns prompt and completion; and optionally tools.
Expect: 50 of 50 held-out answers right, by the exported model of 0.8 M weights. Tokens are bytes.
Time: a minute and a half on two CPU cores.

To fine-tune a pretrained model on your own conversations, all weights or only adapters:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/finetune.py --data path/to/chats.jsonl \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-5 --packing --activation_checkpointing
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/finetune.py --data path/to/chats.jsonl \\
        --model_name_or_path path/or/hub-id --learning_rate 2e-4 --lora_rank 8
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accelerate_recipes import Schedule, fit, flag, parameter_groups, run, start
from accelerate_recipes.common.data import Batch, say
from accelerate_recipes.common.tasks.chat.chat_models import ChatFlags, load_chat_model, small_chat_model, write_answers
from accelerate_recipes.common.tasks.chat.chats import PAD_CHATS, ChatDataset, load_chats
from accelerate_recipes.common.tasks.models.causal_lm import with_losses, with_perplexity
from accelerate_recipes.common.tasks.models.lora import with_adapters
from accelerate_recipes.common.tasks.models.pretrained import export_of
from accelerate_recipes.common.tasks.reading.mixture import Sources

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}


@dataclass(kw_only=True)
class Config(ChatFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "rules"
    epochs: int = 12
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    log_every: int = 50
    optimizer: Literal["adamw", "sgd", "adafactor"] = flag("adamw", "adafactor does not work with sharded weights")
    messages_column: str = flag("messages", "name of the column with a list of messages")
    packing: bool = flag(False, "pack conversations into blocks; attention stays inside each conversation")


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Loss, accuracy and entropy of each example: means over its trained tokens, whose number is its "weight"."""
    others = {name: batch[name] for name in ("positions", "places") if name in batch}
    values: dict[str, Tensor] = model(batch["tokens"], batch["labels"], **others)
    return values


def build(config: Config) -> tuple[nn.Module, Any]:
    """Returns (model that returns losses, tokenizer). Raises UsageError for flags or a path that cannot be used."""
    model, tokenizer = load_chat_model(config, small_chat_model)
    model = with_losses(model, config.packing, config.loss_chunk, config.max_length, measures=True)
    return with_adapters(model, config), tokenizer


def main(config: Config) -> Any:
    """Trains. Returns a function that only the main process calls afterwards: it answers held-out questions."""
    accelerator = start(config)
    model, tokenizer = build(config)
    sources = Sources(
        config,
        lambda data: load_chats(data, tokenizer, config.max_length, config.messages_column, config.max_samples),
    )
    say(sources.train.facts(config.max_length))
    make = partial(ChatDataset, block=config.max_length if config.packing else None)
    optimizer = OPTIMIZERS[config.optimizer](parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(make)
    fit(
        accelerator,
        model,
        optimizer,
        forward_step,
        train_set,
        eval_set,
        config,
        summarize=with_perplexity,
        collate_fn=PAD_CHATS,
        export=export_of(model, tokenizer),
    )
    return None if config.evaluate_only else partial(write_answers, config, tokenizer, sources.evaluation)


if __name__ == "__main__":
    run(main, Config)
