"""Fine-tune a chat model: prompts masked, conversations packed, all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/finetune.py

Data: small conversations whose answers follow rules; or your own JSON-lines or parquet file, or a Hub id, with a column
of messages, or with the columns prompt and completion; and perhaps tools.
Expect: 50 of 50 held-out answers right, by the exported model of 0.8 M weights. Tokens are bytes.
Time: a minute and a half on two CPU cores.

To fine-tune a pretrained model on your own conversations, all weights or adapters alone:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/finetune.py --data path/to/chats.jsonl \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-5 --packing --activation_checkpointing
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/finetune.py --data path/to/chats.jsonl \\
        --model_name_or_path path/or/hub-id --learning_rate 2e-4 --lora_rank 8
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from accelerate_recipes import Schedule, fit, flag, parameter_groups, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.data.facts import say
from accelerate_recipes.common.environment import has_gpu
from accelerate_recipes.common.tasks.causal_lm import (
    checkpoint_activations,
    load_pretrained,
    load_trained,
    with_losses,
)
from accelerate_recipes.common.tasks.chat_models import answer, num_right, small_chat_model, with_chat_template
from accelerate_recipes.common.tasks.chats import PAD_CHATS, ChatDataset, Chats, PackedDataset, load_chats
from accelerate_recipes.common.tasks.lora import LoraFlags, base_of, with_adapters, write_merged
from accelerate_recipes.common.tasks.mixture import Sources
from accelerate_recipes.common.tasks.pretrained import export_of

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}


@dataclass(kw_only=True)
class Config(LoraFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "rules"
    epochs: int = 12
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    log_every: int = 50
    optimizer: Literal["adamw", "sgd", "adafactor"] = flag("adamw", "adafactor: not with shards")
    messages_column: str = flag("messages", "name of the column with a list of messages")
    max_samples: int | None = flag(None, "stream this many conversations and keep them, not all", minimum=1)
    max_length: int = flag(
        256, "tokens of a conversation beyond this number are cut; with --packing of a block", minimum=2
    )
    packing: bool = flag(False, "pack conversations into blocks; attention stays inside each conversation")
    merge: bool = flag(False, "with --lora_rank, write the model with merged adapters to <output_dir>/merged/, too")
    loss_chunk: int = flag(8192 if has_gpu() else 1024, "tokens whose logits are in memory at once; 0: all", minimum=0)
    attention: Literal["sdpa", "eager"] = flag("sdpa", "implementation of attention")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")
    model_name_or_path: str | None = flag(None, "fine-tune this causal model with its tokenizer (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run Python code that the model brings: read it first")
    num_answers: int | None = flag(
        None, "held-out questions for the exported model after training; default: 50, above 1e9 weights 5", minimum=0
    )


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Loss, accuracy and entropy of each example: means over its trained tokens, whose number is its "weight"."""
    others = {name: batch[name] for name in ("positions", "places") if name in batch}
    values: dict[str, Tensor] = model(batch["tokens"], batch["labels"], **others)
    return values


def summarize(means: dict[str, float]) -> dict[str, float]:
    """Adds the perplexity of the trained tokens to the mean metrics of an evaluation."""
    return means | {"perplexity": math.exp(min(means["loss"], 700))}


def build(config: Config) -> tuple[nn.Module, Any]:
    """Returns (model that returns losses, tokenizer). Raises UsageError for flags or a path that cannot be used."""
    path = base_of(config, config.merge)
    if path is None:
        model, tokenizer = small_chat_model(config.max_length, config.attention)
    else:
        load = partial(load_pretrained, path, config.max_length, config.attention, "max_length")
        model, tokenizer = load(trust_remote_code=config.trust_remote_code, tokenizer_path=config.model_name_or_path)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    tokenizer = with_chat_template(tokenizer, model)
    model = with_losses(model, config.packing, config.loss_chunk, config.max_length, measures=True)
    return with_adapters(model, config), tokenizer


def write_answers(config: Config, tokenizer: Any, chats: Chats) -> None:
    """Prints how many held-out questions the exported model answers right, and one answer."""
    folder = config.output_dir / "model"
    if config.merge:
        write_merged(folder, config.output_dir / "merged")
    if config.num_answers == 0:
        return
    model = load_trained(folder)
    asked = chats.select_answered(config.num_answers or (5 if model.num_parameters() > 1e9 else 50))
    if asked:
        answers = answer(model, tokenizer, asked, config.max_length)
        right = num_right(answers, asked)
        print(f"{asked[0].question} {answers[0]}\n{right} of {len(asked)} held-out answers are right")


def main(config: Config) -> Any:
    """Trains. Returns what the main process does alone afterwards: let the exported model answer held-out questions."""
    disable_progress_bar()
    accelerator = start(config)
    model, tokenizer = build(config)
    sources = Sources(
        config,
        lambda data: load_chats(data, tokenizer, config.max_length, config.messages_column, config.max_samples),
    )
    say(sources.train.facts(config.max_length))
    make = partial(PackedDataset, length=config.max_length) if config.packing else ChatDataset
    optimizer = OPTIMIZERS[config.optimizer](parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(make, make)
    fit(
        accelerator,
        model,
        optimizer,
        forward_step,
        train_set,
        eval_set,
        config,
        summarize=summarize,
        collate_fn=PAD_CHATS,
        export=export_of(model, tokenizer),
    )
    return None if config.evaluate_only else partial(write_answers, config, tokenizer, sources.evaluation)


if __name__ == "__main__":
    run(main, Config)
