"""Tiny vision-language models of transformers with random weights, and their real processors."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from accelerate_recipes.common.tasks.chat.vision_chats import shapes
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 1024}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SEES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SQUARE = {"image_size": 16, "patch_size": 4}
Made = tuple[PreTrainedModel, Any]


def without_videos() -> None:
    """Lets the processors of SmolVLM and Qwen-VL do without their part for videos, which needs torchvision."""
    parts, build = ProcessorMixin.get_attributes.__func__, ProcessorMixin.from_args_and_dict.__func__
    initialize, ends = ProcessorMixin.__init__, {"SmolVLMProcessor": [None]}
    if getattr(ProcessorMixin, "video_processor", None):
        return
    ProcessorMixin.video_processor = SimpleNamespace(num_frames=1, fps=1)
    ProcessorMixin.get_attributes = classmethod(lambda kind: [n for n in parts(kind) if n != "video_processor"])
    ProcessorMixin.from_args_and_dict = classmethod(
        lambda kind, args, *rest, **options: build(kind, [*args, *ends.get(kind.__name__, [])], *rest, **options)
    )
    ProcessorMixin.__init__ = lambda self, *args, **options: initialize(
        self, *[arg for arg in args if arg is not None], **options
    )


def _text(*special: str, **more: Any) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """(a tokenizer of bytes with these tokens, the settings of a text model, {token: its id})"""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>"})
    tokenizer.add_tokens([*special], special_tokens=True)
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    return tokenizer, {"vocab_size": 288, **TEXT, **HEADS, **ends, **more}, ids


def _idefics3(config: Any, model: Any, processor: Any, images: Any) -> Made:
    parts = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"
    tokenizer, text, ids = _text(*special, *parts, model_type="llama")
    size, most = {"longest_edge": 32}, {"longest_edge": 16}
    settings = config(vision_config=SEES | SQUARE, text_config=text, image_token_id=ids["<image>"], scale_factor=2,
                      pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True)  # fmt: skip
    image_processor = images(size=size, max_image_size=most, do_image_splitting=True)
    video = [None] * (processor is transformers.SmolVLMProcessor)
    template = TEMPLATE.replace("IMAGE", "<image>")
    return model(settings), processor(image_processor, tokenizer, *video, image_seq_len=4, chat_template=template)


def _idefics2() -> Made:
    tokenizer, text, ids = _text("<image>", "<fake_token_around_image>", "<end_of_utterance>", model_type="mistral")
    config = transformers.Idefics2Config(
        vision_config=SEES | {"image_size": 32, "patch_size": 4},
        text_config=text,
        perceiver_config={"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                          "resampler_head_dim": 8, "num_key_value_heads": 1},
        image_token_id=ids["<image>"],
    )  # fmt: skip
    images = Idefics2ImageProcessorPil(size={"shortest_edge": 16, "longest_edge": 32}, do_image_splitting=False)
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = transformers.Idefics2Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    return transformers.Idefics2ForConditionalGeneration(config), processor


def _qwen(config: Any, model: Any, processor: Any, text: dict[str, Any], vision: dict[str, Any]) -> Made:
    marks = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "image": "<|image_pad|>",
             "video": "<|video_pad|>"}  # fmt: skip
    turned = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokenizer, settings, ids = _text(*marks.values(), rope_parameters=turned, **text)
    sees = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, **vision}
    named = {f"{name}_token_id": ids[mark] for name, mark in marks.items()}
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    template = TEMPLATE.replace("IMAGE", "".join(marks[name] for name in ("vision_start", "image", "vision_end")))
    return (
        model(config(text_config=settings, vision_config=sees, **named)),
        processor(images, tokenizer, chat_template=template),
    )


def _gemma3() -> Made:
    tokenizer, text, ids = _text("<start_of_image>", "<end_of_image>", "<image_soft_token>", head_dim=8)
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer._set_model_specific_special_tokens(names)
    config = transformers.Gemma3Config(
        text_config=text | {"sliding_window": 64},
        vision_config=SEES | SQUARE | {"vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    template = TEMPLATE.replace("IMAGE", "<start_of_image>")
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _llava() -> Made:
    tokenizer, text, ids = _text("<image>", model_type="llama")
    sees = SEES | SQUARE | {"model_type": "clip_vision_model", "projection_dim": 32, "num_hidden_layers": 3}
    config = transformers.LlavaConfig(
        vision_config=sees, text_config=text, image_token_index=ids["<image>"], vision_feature_layer=-2
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = transformers.LlavaProcessor(images, tokenizer, **settings, chat_template=template)
    return transformers.LlavaForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], Made]] = {
    "idefics3": lambda: _idefics3(
        transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration, transformers.Idefics3Processor,
        Idefics3ImageProcessorPil),
    "smolvlm": lambda: _idefics3(
        transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration, transformers.SmolVLMProcessor,
        SmolVLMImageProcessorPil),
    "qwen2_vl": lambda: _qwen(
        transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration, transformers.Qwen2VLProcessor,
        {}, {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": lambda: _qwen(
        transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration,
        transformers.Qwen2_5_VLProcessor, {},
        {"intermediate_size": 64, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": lambda: _qwen(
        transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLProcessor,
        {"head_dim": 8}, {"intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 64,
                          "deepstack_visual_indexes": [0]}),
    "idefics2": _idefics2,
    "gemma3": _gemma3,
    "llava": _llava,
}  # fmt: skip


def made(family: str) -> Made:
    """(model, processor) of a family."""
    without_videos()
    torch.manual_seed(0)
    return FAMILIES[family]()


def write(family: str, folder: Path) -> Path:
    """A folder with the files of a model and its processor."""
    model, processor = made(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_chats(file: Path, number: int) -> Path:
    """A file of conversations about images of several sizes, which lie beside it: two, one or none each."""
    rows = []
    for chat, (messages, images) in enumerate(shapes(number)):
        paths = [f"{chat}_{place}.png" for place in range(len(images))]
        for image, path in zip(images, paths):
            image.save(file.parent / path)
        texts = [{"role": one["role"], "content": one["content"][-1]["text"]} for one in messages]
        texts[0]["content"] = "<image>" * len(images) + texts[0]["content"]
        rows.append({"messages": texts, "images": paths})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file
