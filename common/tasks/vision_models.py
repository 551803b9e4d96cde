"""Vision-language models: a small one from scratch, with its processor."""

from typing import Any

from torch import nn
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, PreTrainedModel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from ..errors import UsageError
from .chat_models import END
from .encoder import freeze_key_biases
from .tokenization import byte_tokenizer

SPECIAL = {"image": "<image>", "around": "<fake_token_around_image>", "whole": "<global-img>", "padding": "<pad>"}
SIZE, PATCH, JOINED = 32, 4, 2  # pixels of an image and of a patch; JOINED x JOINED patches make one token
TEMPLATE = (  # for bytes: U question, A answer
    "{% for message in messages %}{{ message['role'][0].upper() + ' ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\x03' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)


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
    """Freezes weights of the part that sees images which get no gradient but rounding: the key biases, and the last
    weights, if the model takes an earlier layer, as LLaVA does."""
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
    word that is in none, or if nothing is left to train."""
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
