"""Whisper, an encoder-decoder that transcribes recordings token by token."""

from contextlib import suppress
from typing import Any

from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from ...errors import UsageError
from ..models.pretrained import load


def is_whisper(name_or_path: str) -> bool:
    """Whether a model is Whisper. Raises UsageError for another encoder-decoder for recordings."""
    kind = None
    with suppress(Exception):  # the library raises dozens of types; loading the model says what is wrong
        kind = PretrainedConfig.get_config_dict(name_or_path)[0].get("model_type")
    if kind in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES and kind != "whisper":
        raise UsageError(f"--model_name_or_path {name_or_path} is a {kind}: use a Whisper or CTC model")
    return kind == "whisper"


def load_whisper(name_or_path: str, language: str | None, task: str, max_target_length: int) -> tuple[Any, Any, Any]:
    """(a Whisper, its feature extractor, its tokenizer) for texts of one language, by name or code; None: as in the
    tokenizer's files, or the only one. With the `task` "translate" the texts are in English. `generation_config` has
    these settings and the most tokens to write, also in the export. Raises UsageError for a wrong model or language."""
    model, processor, _ = load(AutoModelForSpeechSeq2Seq, name_or_path, "Whisper", AutoProcessor)
    settings, tokenizer = model.generation_config, processor.tokenizer
    known = [token.strip("<|>") for token in getattr(settings, "lang_to_id", None) or {}]
    language = (language or (tokenizer.language if known else None) or "").lower()
    code = TO_LANGUAGE_CODE.get(language, language) or None
    if code not in (known or [None]):
        several = f"knows {len(known)} languages: use the language of the texts, such as --language german"
        knows = several if known else "has no languages in its generation_config.json: remove --language"
        raise UsageError(f"--language {language or 'is missing'}: {name_or_path} {knows}")
    tokenizer.language, tokenizer.task = code, task if code else None
    tokenizer.set_prefix_tokens(predict_timestamps=False)
    longest = min(max_target_length, model.config.max_target_positions - len(tokenizer.prefix_tokens))
    written = {"language": code, "task": tokenizer.task, "forced_decoder_ids": None, "return_timestamps": False}
    written |= {"no_timestamps_token_id": tokenizer.prefix_tokens[-1], "max_new_tokens": longest, "max_length": None}
    # Otherwise pipelines use five beams, and leave out settings that other models do not have.
    vars(settings).update(written | {"num_beams": settings.num_beams or 1, "_from_model_config": False})
    return model, processor.feature_extractor, tokenizer
