"""Models of 24 million to a billion random weights, and data for a few steps, as files that recipes take."""

import json
import runpy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from support.audio import write_recordings, write_wav2vec2
from support.boxes import write_boxes
from support.masks import CLASSES, write_masks
from support.runs import ROOT
from support.small_mnist import write_idx
from support.vision_models import write_chats

WORDS = [
    "one",
    "result",
    "under",
    "every",
    "config",
    "on",
    "each",
    "machine",
    "with",
    "all",
    "samples",
    "and",
    "the",
    "same",
    "weights",
]
STRATEGIES = ["ddp", "fsdp2", "deepspeed_zero2", "tensor_parallel"]  # one config of each kind


@dataclass(frozen=True)
class Case:
    """What `matrix.py` trains.

    Attributes:
        recipe: its path.
        title: for the table.
        flags: of the recipe; {data} is the folder with the data, {model} that of the model.
        write: writes the model into a folder; None: the recipe builds it from the flags.
        configs: under which it runs; None: all.
    """

    recipe: str
    title: str
    flags: str
    write: Callable[[Path], None] | None = None
    configs: list[str] | None = field(default_factory=lambda: [*STRATEGIES])


def _write(folder: Path, kind: str, config: Any, tokenizer: Any) -> None:
    import transformers

    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _decoder(kind: str, config: str, **settings: Any) -> Callable[[Path], None]:
    """Writes a causal model whose tokens are bytes, without dropout."""

    def write(folder: Path) -> None:
        import transformers

        from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

        shape = getattr(transformers, config)(bos_token_id=None, eos_token_id=None, **settings)
        _write(folder, kind, shape, byte_tokenizer())

    return write


def _llama(**settings: Any) -> Callable[[Path], None]:
    """Writes a Llama with a vocabulary of 32,000, and without other settings 12 layers and the hidden size 768."""
    shape = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 12, "max_position_embeddings": 1024}
    return _decoder("LlamaForCausalLM", "LlamaConfig", **(shape | heads | settings))


def _bert(folder: Path) -> None:
    from transformers import BertConfig

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    _write(folder, "BertModel", config, word_tokenizer([" ".join(2 * WORDS)], 4096))


def _modernbert(folder: Path) -> None:
    from transformers import ModernBertConfig

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    tokenizer = word_tokenizer([" ".join(2 * WORDS)], 4096, masks=True)
    ids = {"pad_token_id": tokenizer.pad_token_id, "cls_token_id": tokenizer.cls_token_id, "sep_token_id": None}
    config = ModernBertConfig(vocab_size=4096, bos_token_id=None, eos_token_id=None, **ids)
    _write(folder, "ModernBertForMaskedLM", config, tokenizer)


def _t5(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import T5Config

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    tokenizer = word_tokenizer([" ".join(2 * WORDS)], 4096)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    ends = [("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=ends)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": 0}
    shape = {"vocab_size": 32000, "d_model": 512, "d_ff": 2048, "num_layers": 12, "num_heads": 8, "dropout_rate": 0.0}
    _write(folder, "T5ForConditionalGeneration", T5Config(**shape, **ids), tokenizer)


def _student(folder: Path) -> None:
    """Also writes a teacher with two layers, into `teacher` beside the folder."""
    _llama(num_hidden_layers=2)(folder.with_name("teacher"))
    _llama()(folder)


def _wav2vec2(folder: Path) -> None:
    """Writes a Wav2Vec2 of the size of wav2vec2-base with a 13th layer, whose output does not depend on padding."""
    shape = {"hidden_size": 768, "num_hidden_layers": 13, "num_attention_heads": 12, "intermediate_size": 3072}
    shape |= {"conv_dim": (512,) * 7, "conv_kernel": (10, 3, 3, 3, 3, 2, 2), "conv_stride": (5, 2, 2, 2, 2, 2, 2)}
    shape |= {"num_conv_pos_embeddings": 128, "num_conv_pos_embedding_groups": 16}
    write_wav2vec2(folder, **shape)


def _vision(folder: Path) -> None:
    """Writes an Idefics3, the architecture of SmolVLM, and its processor."""
    from transformers import Idefics3ForConditionalGeneration

    small_vision_model = runpy.run_path(str(ROOT / "recipes" / "vision_language.py"))["small_vision_model"]
    small, processor = small_vision_model(512, "sdpa")
    layers = {"num_hidden_layers": 12, "num_attention_heads": 12}
    for part, sizes in (
        (small.config.text_config, {"hidden_size": 768, "intermediate_size": 2048, "head_dim": 64}),
        (small.config.vision_config, {"hidden_size": 384, "intermediate_size": 1536}),
    ):
        for name, size in (sizes | layers).items():
            setattr(part, name, size)
    small.config.text_config.num_key_value_heads = 12
    _write(folder, Idefics3ForConditionalGeneration.__name__, small.config, processor)


def _image_model(
    kind: str, config: str, num_labels: int = 3, processor: dict[str, str] | None = None, **settings: Any
) -> Callable[[Path], None]:
    """Writes a model for images of 224 × 224 pixels, and the settings of its preprocessing."""

    def write(folder: Path) -> None:
        import transformers

        _write(folder, kind, getattr(transformers, config)(num_labels=num_labels, **settings), None)
        statistics = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3}
        content = {"size": {"height": 224, "width": 224}, **statistics, **(processor or {})}
        (folder / "preprocessor_config.json").write_text(json.dumps(content))

    return write


TEXT = "--data {data}/text.txt --context 32 --batch_size 8 --sample_tokens 0 --model_name_or_path {model}"
CHATS = "--data {data}/chats.jsonl --max_length 64 --batch_size 8 --num_answers 0 --model_name_or_path {model}"
IMAGES = "--data {data}/pictures --batch_size 4 --label_smoothing 0 --least_area 1 --model_name_or_path {model}"
GPT2 = _decoder("GPT2LMHeadModel", "GPT2Config", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MIXTRAL = _decoder(
    "MixtralForCausalLM",
    "MixtralConfig",
    vocab_size=8000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=8,
)
CASES = {
    "llama": Case("recipes/transformer.py", "Llama, 134 M", TEXT, _llama(), configs=None),
    "llama_1b": Case(
        "tests/large/transformer_sgd.py",
        "Llama, 1.0 B, with SGD",
        f"{TEXT} --check_steps 0",
        _llama(hidden_size=2048, intermediate_size=5632, num_hidden_layers=17, num_attention_heads=16),
        ["fsdp2_tensor_parallel", "fsdp2_pipeline", "fsdp2_tensor_pipeline"],
    ),
    "llama_tied": Case(
        "recipes/transformer.py",
        "Llama with a tied head and grouped queries, 100 M",
        TEXT,
        _llama(tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "gpt2": Case("recipes/transformer.py", "GPT-2, 124 M", TEXT, GPT2),
    "mixtral": Case(
        "recipes/transformer.py", "Mixtral, 8 experts, 115 M", TEXT, MIXTRAL, [*STRATEGIES, "fsdp2_expert_parallel"]
    ),
    "bert": Case(
        "recipes/text_classification.py",
        "BERT-base, 109 M",
        "--data {data}/texts.csv --max_length 16 --batch_size 8 --model_name_or_path {model}",
        _bert,
    ),
    "bert_pairs": Case(
        "recipes/embeddings.py",
        "BERT-base, 109 M",
        "--data {data}/pairs.csv --max_length 16 --batch_size 8 --model_name_or_path {model}",
        _bert,
    ),
    "vit": Case(
        "recipes/image_classification.py",
        "ViT-B/16, 86 M",
        IMAGES,
        _image_model(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
    ),
    "resnet": Case(
        "recipes/image_classification.py",
        "ResNet-50, 24 M",
        IMAGES,
        _image_model("ResNetForImageClassification", "ResNetConfig"),
    ),
    "token_classification": Case(
        "recipes/token_classification.py",
        "BERT-base, 109 M",
        "--data {data}/tags.conll --max_length 32 --batch_size 8 --model_name_or_path {model}",
        _bert,
    ),
    "question_answering": Case(
        "recipes/question_answering.py",
        "BERT-base, 109 M",
        "--data {data}/questions.jsonl --max_length 32 --stride 8 --batch_size 8 --model_name_or_path {model}",
        _bert,
    ),
    "masked_lm": Case(
        "recipes/masked_lm.py",
        "ModernBERT-base, 114 M",
        "--data {data}/text.txt --max_length 32 --batch_size 8 --model_name_or_path {model}",
        _modernbert,
    ),
    "translation": Case(
        "recipes/translation.py",
        "T5, 104 M",
        "--data {data}/pairs.csv --source_column query --target_column document --max_length 16 "
        "--max_target_length 16 --batch_size 8 --model_name_or_path {model}",
        _t5,
    ),
    "segmentation": Case(
        "recipes/segmentation.py",
        "SegFormer-B5, 85 M",
        "--data {data}/masks --batch_size 4 --least_area 1 --model_name_or_path {model}",
        _image_model(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            num_labels=CLASSES,
            depths=[3, 6, 40, 3],
            hidden_sizes=[64, 128, 320, 512],
            decoder_hidden_size=768,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
        ),
    ),
    "detection": Case(
        "recipes/detection.py",
        "YOLOS with 14 layers, 105 M",
        "--data {data}/boxes --batch_size 4 --model_name_or_path {model}",
        _image_model(
            "YolosForObjectDetection",
            "YolosConfig",
            processor={"image_processor_type": "YolosImageProcessor"},
            num_hidden_layers=14,
            image_size=[224, 224],
        ),
    ),
    "speech": Case(
        "recipes/speech.py",
        "Wav2Vec2, 101 M",
        "--data {data}/recordings --text_column transcription --batch_size 8 --model_name_or_path {model}",
        _wav2vec2,
    ),
    "distillation": Case("recipes/distillation.py", "Llama, 134 M", f"{CHATS} --teacher {{data}}/../teacher", _student),
    "finetune": Case("recipes/finetune.py", "Llama, 134 M", CHATS, _llama()),
    "finetune_lora": Case("recipes/finetune.py", "Llama, 134 M, LoRA", f"{CHATS} --lora_rank 8", _llama()),
    "vision_language": Case(
        "recipes/vision_language.py", "Idefics3, 107 M", CHATS.replace("chats", "seen").replace("64", "256"), _vision
    ),
    "preferences": Case(
        "recipes/preferences.py",
        "Llama with a tied head, 110 M",
        CHATS.replace("chats", "pairs"),
        _llama(tie_word_embeddings=True),
    ),
    "diffusion": Case(
        "recipes/diffusion.py",
        "DiT-B, 130 M",
        "--data {data}/images --patch_size 4 --hidden_size 768 --num_layers 12 --num_heads 12 --batch_size 8 "
        "--num_pictures 0",
    ),
}


def write_data(folder: Path) -> None:
    """Writes texts with labels, tags, questions and pairs, chats, preferences, images and recordings, all small."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = [" ".join(WORDS[(start * step + start // 15) % 15] for step in range(1, 8)) for start in range(1, 61)]
    (folder / "text.txt").write_text("\n".join(lines))
    rows = [f"{line},{'odd' if number % 2 else 'even'}" for number, line in enumerate(lines)]
    (folder / "texts.csv").write_text("\n".join(["text,label", *rows]))
    rows = [f"{line},{other}" for line, other in zip(lines, reversed(lines))]
    (folder / "pairs.csv").write_text("\n".join(["query,document", *rows]))
    with (folder / "chats.jsonl").open("w") as chats, (folder / "pairs.jsonl").open("w") as pairs:
        for line, other in zip(lines, reversed(lines)):
            question, answer, wrong = (
                {"role": role, "content": text[:20]}
                for role, text in (("user", line), ("assistant", other), ("assistant", line))
            )
            print(json.dumps({"messages": [question, answer]}), file=chats)
            print(json.dumps({"chosen": [question, answer], "rejected": [question, wrong]}), file=pairs)
    tags = [f"{word} {'B-LONG' if len(word) > 5 else 'O'}" for line in lines for word in (*line.split(), "")]
    (folder / "tags.conll").write_text("\n".join(tag if tag[0] != " " else "" for tag in tags))
    asked = [{"context": line, "question": "which word is long", "answers": line.split()[2]} for line in lines]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
    write_masks(folder / "masks", (40, 8))
    write_boxes(folder / "boxes", (40, 8))
    write_recordings(folder / "recordings", numbers=(40, 8))
    write_chats(folder / "seen.jsonl", 60)
    _write_images(folder)


def _write_images(folder: Path) -> None:
    from PIL import Image

    generator = numpy.random.default_rng(0)
    for name in ("red", "green", "blue"):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(10):
            pixels = generator.integers(0, 256, (240, 240, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
    (folder / "images").mkdir()
    for name, size in (("train", 64), ("t10k", 8)):
        write_idx(folder / "images" / f"{name}-images-idx3-ubyte", generator.integers(0, 256, (size, 28, 28)))
        write_idx(folder / "images" / f"{name}-labels-idx1-ubyte", numpy.arange(size) % 4)
