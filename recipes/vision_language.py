"""Fine-tune a vision-language model on conversations with images: loss on the answers, all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/vision_language.py

Data: drawn images of shapes with questions about them; or your own JSON-lines or parquet file, or a Hub id, with a
column of messages and a column of images.
Expect: 48 of 50 held-out answers right, by the exported model of 0.8 M weights.
Time: two minutes on two CPU cores.

To fine-tune a pretrained model, such as SmolVLM, Qwen-VL or Gemma 3, on your own conversations, all weights or adapters
alone:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/vision_language.py \\
        --data path/to/chats.jsonl --model_name_or_path path/or/hub-id --learning_rate 1e-5 --max_length 4096
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/vision_language.py \\
        --data path/to/chats.jsonl --model_name_or_path path/or/hub-id --learning_rate 2e-4 --max_length 4096 \\
        --lora_rank 8
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from accelerate_recipes import Schedule, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.causal_lm import with_losses, with_perplexity
from accelerate_recipes.common.tasks.chat_models import ChatFlags, load_chat_model, write_answers
from accelerate_recipes.common.tasks.lora import with_adapters
from accelerate_recipes.common.tasks.mixture import Sources
from accelerate_recipes.common.tasks.pretrained import export_of
from accelerate_recipes.common.tasks.vision_batches import VisionDataset, VisionEncoder, unpad
from accelerate_recipes.common.tasks.vision_chats import load_vision_chats
from accelerate_recipes.common.tasks.vision_models import freeze_idle, freeze_named, small_vision_model

KIND = AutoModelForImageTextToText


@dataclass(kw_only=True)
class Config(ChatFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "shapes"
    epochs: int = 5
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    log_every: int = 50
    messages_column: str = flag("messages", "name of the column with a list of messages")
    images_column: str = flag("images", "name of the column with the images of a conversation, in order")
    freeze: str = flag("", "no weight is trained that has one of these words in its name, such as vision_model")


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of each example: the mean over its trained tokens. The "weight" of the batch is their number."""
    return {"loss": model(**{name: value for name, value in batch.items() if name != "weight"})}


def build(config: Config) -> tuple[nn.Module, VisionEncoder]:
    """Returns (model that returns losses, what makes its batches). Raises UsageError for flags or a path that cannot be
    used."""
    model, processor = load_chat_model(config, small_vision_model, KIND)
    encoder = VisionEncoder(processor, model.config.image_token_id, config.max_length)
    model = with_losses(model, chunk=config.loss_chunk, longest=config.max_length, sees=unpad)
    trained = with_adapters(model, config)
    freeze_idle(model)
    freeze_named(trained, config.freeze)
    return trained, encoder


def main(config: Config) -> Any:
    """Trains. Returns what the main process does alone afterwards: let the exported model answer held-out questions."""
    accelerator = start(config)
    model, encoder = build(config)
    sources = Sources(
        config,
        lambda data: load_vision_chats(data, config.messages_column, config.images_column, config.max_samples),
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    make = partial(VisionDataset, encoder=encoder)
    print_once(make(sources.train).facts())
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
        collate_fn=encoder.collate,
        export=export_of(model, encoder.processor),
    )
    return None if config.evaluate_only else partial(write_answers, config, encoder.processor, sources.evaluation, KIND)


if __name__ == "__main__":
    run(main, Config)
