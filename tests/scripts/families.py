"""A recipe that trains a small model of one family of transformers.

families.py --family NAME
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from common import RunConfig, fit, flag, run, start
from common.data import Batch

TOKENS, LENGTH, PIXELS, FRAMES = 32, 12, 32, 64
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = SHAPE | {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"image_size": PIXELS, "patch_size": 8, "num_channels": 3}


class Samples(Dataset):
    """Tokens, a picture, a spectrogram, a waveform and a class."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + index)
        return {
            "tokens": torch.randint(3, TOKENS, (LENGTH,), generator=generator),
            "image": torch.randn(3, PIXELS, PIXELS, generator=generator),
            "spectrogram": torch.randn(8, FRAMES, generator=generator),
            "wave": torch.randn(800, generator=generator),
            "label": index % 2,
        }


def classified(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch["image"]).logits, batch["label"], reduction="none")}


def continued(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(input_ids=batch["tokens"]).logits[:, :-1]
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)}


def matched(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    found = model(input_ids=batch["tokens"], pixel_values=batch["image"])
    return {"loss": 1 - F.cosine_similarity(found.text_embeds, found.image_embeds)}


def transcribed(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(input_features=batch["spectrogram"], decoder_input_ids=batch["tokens"]).logits[:, :-1]
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)}


def heard(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch["wave"]).logits, batch["label"], reduction="none")}


def whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "vocab_size": TOKENS}
    places = {"max_source_positions": FRAMES // 2, "max_target_positions": LENGTH, "dropout": 0.0}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**sizes, **heads, **places, **ids, suppress_tokens=None, begin_suppress_tokens=None)
    config.use_cache = False
    return hf.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0}
    position = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "activation_dropout": 0.0}
    masks = {"mask_time_prob": 0.2, "mask_time_length": 4}  # SpecAugment draws from NumPy
    return hf.Wav2Vec2ForSequenceClassification(
        hf.Wav2Vec2Config(**SHAPE, **convolutions, **quiet, **position, **masks, final_dropout=0.0, vocab_size=TOKENS)
    )


def causal(kind: str, **options: Any) -> nn.Module:
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **(TEXT | {"use_cache": False} | options)))


def vision(kind: str, **options: Any) -> nn.Module:
    return hf.AutoModelForImageClassification.from_config(hf.AutoConfig.for_model(kind, **options))


def clip() -> nn.Module:
    config = hf.CLIPConfig(text_config=TEXT | {"max_position_embeddings": LENGTH}, vision_config=SHAPE | VISION)
    config.projection_dim = config.text_config.projection_dim = config.vision_config.projection_dim = 16
    model = hf.CLIPModel(config)
    model.logit_scale.requires_grad_(False)  # the loss does not use it
    return model


QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "vit": (lambda: vision("vit", **SHAPE, **VISION, **QUIET), classified),
    "swin": (
        lambda: vision(
            "swin", image_size=PIXELS, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
        ),
        classified,
    ),
    "convnext": (lambda: vision("convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), classified),
    "resnet": (
        lambda: vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        classified,
    ),
    "dinov2": (lambda: vision("dinov2", **SHAPE, **VISION, drop_path_rate=0.0), classified),
    "clip": (clip, matched),
    "whisper": (whisper, transcribed),
    "wav2vec2": (wav2vec2, heard),
    "mamba": (lambda: causal("mamba", state_size=4, conv_kernel=2), continued),
    "mamba2": (
        lambda: causal("mamba2", state_size=4, conv_kernel=2, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
        continued,
    ),
    "opt": (
        lambda: causal("opt", ffn_dim=32, max_position_embeddings=LENGTH, dropout=0.0, word_embed_proj_dim=16),
        continued,
    ),
    "falcon": (lambda: causal("falcon", hidden_dropout=0.0, attention_dropout=0.0), continued),
    "gpt_neox": (lambda: causal("gpt_neox", hidden_dropout=0.0, attention_dropout=0.0), continued),
    "qwen3": (lambda: causal("qwen3", num_key_value_heads=2, head_dim=8), continued),
    "gemma3": (lambda: causal("gemma3_text", num_key_value_heads=2, head_dim=8), continued),
}


@dataclass(kw_only=True)
class Config(RunConfig):
    family: str = flag("vit", "which family")
    batch_size: int = 8
    micro_batch_size: int | None = 2
    learning_rate: float = 1e-2
    max_steps: int | None = 4
    log_every: int = 1


def main(config: Config) -> None:
    accelerator = start(config)
    build, forward_step = FAMILIES[config.family]
    model = build()
    # SGD: Adam makes steps of the rounding noise in a key bias.
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, momentum=0.9)
    fit(accelerator, model, optimizer, forward_step, Samples(32, seed=1), Samples(10, seed=2), config)


if __name__ == "__main__":
    run(main, Config)
