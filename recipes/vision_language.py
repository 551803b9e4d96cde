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

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

from accelerate_recipes import Schedule, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.environment import has_gpu
from accelerate_recipes.common.tasks.causal_lm import checkpoint_activations, load_pretrained, load_trained, with_losses
from accelerate_recipes.common.tasks.chat_models import answer, num_right, with_chat_template
from accelerate_recipes.common.tasks.conversations import Conversation
from accelerate_recipes.common.tasks.lora import LoraFlags, base_of, with_adapters, write_merged
from accelerate_recipes.common.tasks.mixture import Sources
from accelerate_recipes.common.tasks.pretrained import export_of
from accelerate_recipes.common.tasks.vision_batches import VisionDataset, VisionEncoder, unpad
from accelerate_recipes.common.tasks.vision_chats import VisionChats, load_vision_chats
from accelerate_recipes.common.tasks.vision_models import (
    freeze_image_keys,
    freeze_named,
    freeze_unused,
    small_vision_model,
)


@dataclass(kw_only=True)
class Config(LoraFlags):
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
    max_samples: int | None = flag(None, "stream this many conversations and keep them, not all", minimum=1)
    max_length: int = flag(256, "tokens of a conversation beyond this number are cut; images must fit", minimum=2)
    freeze: str = flag("", "no weight is trained that has one of these words in its name, such as vision_model")
    merge: bool = flag(False, "with --lora_rank, write the model with merged adapters to <output_dir>/merged/, too")
    loss_chunk: int = flag(8192 if has_gpu() else 1024, "tokens whose logits are in memory at once; 0: all", minimum=0)
    attention: Literal["sdpa", "eager"] = flag("sdpa", "implementation of attention")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")
    model_name_or_path: str | None = flag(None, "fine-tune this vision-language model (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run Python code that the model brings: read it first")
    num_answers: int = flag(50, "held-out questions for the exported model after training", minimum=0)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of each example: the mean over its trained tokens. The "weight" of the batch is their number."""
    return {"loss": model(**{name: value for name, value in batch.items() if name != "weight"})}


def summarize(means: dict[str, float]) -> dict[str, float]:
    """Adds the perplexity of the trained tokens to the mean metrics of an evaluation."""
    return means | {"perplexity": math.exp(min(means["loss"], 700))}


def build(config: Config) -> tuple[nn.Module, VisionEncoder]:
    """Returns (model that returns losses, what makes its batches). Raises UsageError for flags or a path that cannot be
    used."""
    path, kind = base_of(config, config.merge), AutoModelForImageTextToText
    if path is None:
        model, processor = small_vision_model(config.max_length, config.attention)
    else:
        limits = config.max_length, config.attention, "max_length"
        others = config.trust_remote_code, config.model_name_or_path
        model, processor = load_pretrained(path, *limits, kind, "vision-language model", *others)
    freeze_image_keys(model)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    processor = with_chat_template(processor, model)
    encoder = VisionEncoder(processor, model.config.image_token_id, config.max_length)
    model = with_losses(model, chunk=config.loss_chunk, longest=config.max_length, sees=unpad)
    trained = with_adapters(model, config)
    freeze_unused(model)
    freeze_named(trained, config.freeze)
    return trained, encoder


def write_answers(config: Config, processor: Any, chats: VisionChats) -> None:
    """Prints how many held-out questions the exported model answers right, and one answer."""
    folder, kind = config.output_dir / "model", AutoModelForImageTextToText
    if config.merge:
        write_merged(folder, config.output_dir / "merged", kind)
    read = [chats.read(index) for index in range(min(config.num_answers, len(chats)))]
    kept = [(Conversation(messages), images) for messages, images in read if messages[-1]["role"] == "assistant"]
    if kept:
        asked, images = zip(*kept)
        answers = answer(load_trained(folder, kind), processor, asked, config.max_length, images)
        print(f"{asked[0].question} {answers[0]}")
        print(f"{num_right(answers, asked)} of {len(asked)} held-out answers are right")


def main(config: Config) -> Any:
    """Trains. Returns what the main process does alone afterwards: let the exported model answer held-out questions."""
    disable_progress_bar()
    accelerator = start(config)
    model, encoder = build(config)
    sources = Sources(
        config,
        lambda data: load_vision_chats(data, config.messages_column, config.images_column, config.max_samples),
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    make = partial(VisionDataset, encoder=encoder)
    print_once(make(sources.train).facts())
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
        collate_fn=encoder.collate,
        export=export_of(model, encoder.processor),
    )
    return None if config.evaluate_only else partial(write_answers, config, encoder.processor, sources.evaluation)


if __name__ == "__main__":
    run(main, Config)
