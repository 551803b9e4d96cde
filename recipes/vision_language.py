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
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedModel,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.chat.chat_models import END, ChatFlags, load_chat_model, write_answers
from accelerate_recipes.common.tasks.chat.vision_batches import VisionDataset, VisionEncoder, unpad
from accelerate_recipes.common.tasks.chat.vision_chats import load_vision_chats
from accelerate_recipes.common.tasks.models.causal_lm import with_losses, with_perplexity
from accelerate_recipes.common.tasks.models.encoder import freeze_key_biases
from accelerate_recipes.common.tasks.models.lora import with_adapters
from accelerate_recipes.common.tasks.models.pretrained import export_of
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.reading.mixture import Sources

KIND = AutoModelForImageTextToText
SPECIAL = {"image": "<image>", "around": "<fake_token_around_image>", "whole": "<global-img>", "padding": "<pad>"}
SIZE, PATCH, JOINED = 32, 4, 2  # pixels of an image and of a patch; JOINED x JOINED patches make one token
TEMPLATE = (  # for bytes: U question, A answer
    "{% for message in messages %}{{ message['role'][0].upper() + ' ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\x03' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)


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
    freeze: str = flag("", "freeze weights whose name contains one of these words, such as vision_model")


def small_vision_model(max_length: int, attention: str) -> tuple[PreTrainedModel, Any]:
    """Returns (an Idefics3, the architecture of SmolVLM, of 0.8 M weights whose tokens are bytes and parts of images,
    its processor)."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*SPECIAL.values()], special_tokens=True)
    tokenizer.pad_token = SPECIAL["padding"]
    vision = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokens = {"vocab_size": 264, "bos_token_id": None, "eos_token_id": ord(END), "pad_token_id": tokenizer.pad_token_id}
    config = Idefics3Config(
        vision_config={**vision, "image_size": SIZE, "patch_size": PATCH},
        text_config={**text, **tokens, "model_type": "llama", "max_position_embeddings": max_length},
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL["image"]),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=JOINED,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    edge = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    length = (SIZE // PATCH // JOINED) ** 2
    processor = Idefics3Processor(images, tokenizer, image_seq_len=length, chat_template=TEMPLATE)
    return Idefics3ForConditionalGeneration(config), processor


def freeze_idle(model: PreTrainedModel) -> None:
    """Freezes the weights of the vision encoder whose gradient is zero or only rounding errors: the key biases, and the
    last weights, if the model uses the output of an earlier layer, as LLaVA does."""
    tower = model.get_encoder(modality="image")
    freeze_key_biases(tower)
    chosen = getattr(model.config, "vision_feature_layer", None)
    if chosen is None:
        return
    num_layers = model.config.vision_config.num_hidden_layers
    last = max(layer % (num_layers + 1) for layer in ([chosen] if isinstance(chosen, int) else chosen))
    layers = [(f"{name}.{last - 1}.", part) for name, part in tower.named_modules() if isinstance(part, nn.ModuleList)]
    start = next((start for start, part in layers if len(part) == num_layers), "")
    weights = list(tower.named_parameters())
    used = max((at for at, (name, _) in enumerate(weights) if name.startswith(start)), default=len(weights))
    for _, weight in weights[used + 1 :]:
        weight.requires_grad_(False)


def freeze_named(model: nn.Module, words: str) -> None:
    """Freezes the weights that have one of these words, separated by commas, in their name. Raises UsageError for a
    word that is in no name, or if nothing is left to train."""
    weights = {name.removeprefix("base_model.model."): weight for name, weight in model.named_parameters()}  # PEFT's
    for word in filter(None, map(str.strip, words.split(","))):
        found = [name for name in weights if word in name]
        if not found:
            parts = dict.fromkeys(".".join(name.split(".")[:2]) for name in weights)
            raise UsageError(f"--freeze {words}: no weight has {word} in its name; use a part of {', '.join(parts)}")
        for name in found:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise UsageError(f"--freeze {words} leaves nothing to train: use fewer words")


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of each example: the mean over its trained tokens. The "weight" of the batch is their number."""
    return {"loss": model(**{name: value for name, value in batch.items() if name != "weight"})}


def build(config: Config) -> tuple[nn.Module, VisionEncoder]:
    """Returns (model that returns losses, encoder of its batches). Raises UsageError for flags or a path that cannot be
    used."""
    model, processor = load_chat_model(config, small_vision_model, KIND)
    encoder = VisionEncoder(processor, model.config.image_token_id, config.max_length)
    model = with_losses(model, chunk=config.loss_chunk, longest=config.max_length, sees=unpad)
    trained = with_adapters(model, config)
    freeze_idle(model)
    freeze_named(trained, config.freeze)
    return trained, encoder


def main(config: Config) -> Any:
    """Trains. Returns a function that only the main process calls afterwards: it answers held-out questions."""
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
