"""Small models of transformers, one of each family, and the steps that train them."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from samples import FRAMES, LENGTH, PIXELS, VOCABULARY, WIDTH
from steps import Values, causal_step
from torch import nn
from torch.nn import functional as F

from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.models.causal_lm import with_losses

SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = SHAPE | {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"image_size": PIXELS, "patch_size": 8, "num_channels": 3}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classified(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": F.cross_entropy(model(batch["image"]).logits, batch["label"], reduction="none")}


def continued(model: Any, batch: Batch, whole: nn.Module) -> Values:
    logits = model(input_ids=batch["tokens"]).logits
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["next"], reduction="none").mean(1)}


def text_classified(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": F.cross_entropy(model(input_ids=batch["tokens"]).logits, batch["label"], reduction="none")}


def translated(model: Any, batch: Batch, whole: nn.Module) -> Values:
    logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["tokens"]).logits
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["next"], reduction="none").mean(1)}


def matched(model: Any, batch: Batch, whole: nn.Module) -> Values:
    found = model(input_ids=batch["tokens"], pixel_values=batch["image"])
    return {"loss": 1 - F.cosine_similarity(found.text_embeds, found.image_embeds)}


def matched_at_a_temperature(model: Any, batch: Batch, whole: nn.Module) -> Values:
    found = model(input_ids=batch["tokens"], pixel_values=batch["image"])
    return {"loss": F.softplus(-found.logits_per_text.diagonal())}


def unmasked(model: Any, batch: Batch, whole: nn.Module) -> Values:
    logits = model(input_ids=batch["tokens"].where(batch["tokens"] % 5 > 0, 3)).logits
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["tokens"], reduction="none").mean(1)}


def transcribed(model: Any, batch: Batch, whole: nn.Module) -> Values:
    logits = model(input_features=batch["spectrogram"], decoder_input_ids=batch["tokens"]).logits
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["next"], reduction="none").mean(1)}


def heard(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": F.cross_entropy(model(batch["wave"]).logits, batch["label"], reduction="none")}


def tied() -> nn.Module:
    return with_losses(hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, tie_word_embeddings=True)))


def experts() -> nn.Module:
    shape = {"num_key_value_heads": 2, "num_local_experts": 4}
    return with_losses(hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, **shape)))


def encoder() -> nn.Module:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **QUIET))
    for layer in model.bert.encoder.layer:  # their true gradient is zero, and Adam makes steps of the rounding noise
        layer.attention.self.key.bias.requires_grad_(False)
    return model


def encoder_decoder() -> nn.Module:
    shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(vocab_size=VOCABULARY, **shape, dropout_rate=0.0, use_cache=False)
    return hf.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "vocab_size": VOCABULARY}
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
    sizes = SHAPE | convolutions | quiet | position | masks
    return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**sizes, final_dropout=0.0, vocab_size=VOCABULARY))


def bart() -> nn.Module:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": LENGTH}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, dropout=0.0, use_cache=False, **layers, **heads, **ids)
    return hf.BartForConditionalGeneration(config)


def clip_with_temperature() -> nn.Module:
    model = clip()
    model.logit_scale.requires_grad_(True)
    return model


def clip() -> nn.Module:
    config = hf.CLIPConfig(text_config=TEXT | {"max_position_embeddings": LENGTH}, vision_config=SHAPE | VISION)
    config.projection_dim = config.text_config.projection_dim = config.vision_config.projection_dim = 16
    model = hf.CLIPModel(config)
    model.logit_scale.requires_grad_(False)  # the loss does not use it
    return model


def causal(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = hf.AutoConfig.for_model(kind, **(TEXT | {"use_cache": False} | options))
        return hf.AutoModelForCausalLM.from_config(config)

    return build


def vision(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForImageClassification.from_config(hf.AutoConfig.for_model(kind, **options))


Family = tuple[Callable[[], nn.Module], Callable[..., Values]]
ZOO: dict[str, Family] = {
    "tied": (tied, causal_step),
    "encoder": (encoder, text_classified),
    "encoder_decoder": (encoder_decoder, translated),
    "experts": (experts, causal_step),
}
WINDOWS = {"patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
MAMBA2 = {"state_size": 4, "conv_kernel": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
ROUTED |= {"num_key_value_heads": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, Family] = {
    "vit": (vision("vit", **SHAPE, **VISION, **QUIET), classified),
    "swin": (vision("swin", image_size=PIXELS, **WINDOWS), classified),
    "convnext": (vision("convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), classified),
    "resnet": (
        vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        classified,
    ),
    "dinov2": (vision("dinov2", **SHAPE, **VISION, drop_path_rate=0.0), classified),
    "clip": (clip, matched),
    "clip_with_temperature": (clip_with_temperature, matched_at_a_temperature),
    "bart": (bart, translated),
    "bert_masked": (lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT, **QUIET)), unmasked),
    "whisper": (whisper, transcribed),
    "wav2vec2": (wav2vec2, heard),
    "mamba": (causal("mamba", state_size=4, conv_kernel=2), continued),
    "mamba2": (causal("mamba2", **MAMBA2), continued),
    "opt": (
        causal("opt", ffn_dim=32, max_position_embeddings=LENGTH, dropout=0.0, word_embed_proj_dim=16),
        continued,
    ),
    "falcon": (causal("falcon", hidden_dropout=0.0, attention_dropout=0.0), continued),
    "gpt2": (causal("gpt2", n_head=2, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), continued),
    "gpt_neox": (causal("gpt_neox", hidden_dropout=0.0, attention_dropout=0.0), continued),
    "qwen2": (causal("qwen2", num_key_value_heads=2), continued),
    "qwen3": (causal("qwen3", num_key_value_heads=2, head_dim=8), continued),
    "deepseek_v2": (causal("deepseek_v2", **LATENT, **ROUTED), continued),
    "phi3": (causal("phi3", num_key_value_heads=2), continued),
    "gemma3": (causal("gemma3_text", num_key_value_heads=2, head_dim=8), continued),
}
