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


def _image_model(kind: str, config: str, **settings: Any) -> Callable[[Path], None]:
    """Writes an image classifier for 3 classes and images of 224 × 224 pixels."""

    def write(folder: Path) -> None:
        import transformers

        _write(folder, kind, getattr(transformers, config)(num_labels=3, **settings), None)
        statistics = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3}
        content = {"size": {"height": 224, "width": 224}, **statistics}
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
    """Writes a text, labelled texts, pairs of texts, chats, preferences and images, all small."""
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
