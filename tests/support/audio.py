"""Recordings in files, a small Wav2Vec2, and a small Whisper."""

import json
from pathlib import Path
from typing import Any

import numpy
import soundfile
import torch

RATE, LETTERS = 8000, "abcde"


def tones(text: str, seed: int, rate: int = RATE) -> numpy.ndarray:
    """A tone of 60 ms for each letter, and a pause for a space, with noise."""
    draw = numpy.random.default_rng(seed)
    seconds = numpy.arange(int(0.06 * rate)) / rate
    parts = [0 * seconds if each == " " else numpy.sin(600 * (2 + LETTERS.index(each)) * seconds) for each in text]
    wave = numpy.concatenate([part for each in parts for part in (each, numpy.zeros(int(0.02 * rate)))])
    return (0.3 * wave + draw.normal(0, 0.02, len(wave))).astype(numpy.float32)


def texts(number: int, seed: int) -> list[str]:
    """Texts of one or two words."""
    draw = numpy.random.default_rng(seed)
    words = [["".join(draw.choice(list(LETTERS), draw.integers(1, 4))) for _ in range(2)] for _ in range(number)]
    return [" ".join(pair[: 1 + row % 2]) for row, pair in enumerate(words)]


def write_recordings(
    folder: Path, column: str = "transcription", numbers: tuple[int, int] = (170, 33)
) -> dict[str, list[str]]:
    """WAV files for training and evaluation beside metadata.jsonl. Returns {part: texts}."""
    found = {}
    for seed, (part, number) in enumerate(zip(("train", "test"), numbers)):
        (folder / part).mkdir(parents=True)
        found[part], rows = texts(number, seed), []
        for row, text in enumerate(found[part]):
            soundfile.write(folder / part / f"{row:03}.wav", tones(text, row), RATE)
            rows.append({"file_name": f"{row:03}.wav", column: text})
        (folder / part / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return found


def write_classes(folder: Path) -> Path:
    """WAV files in folders of classes: the first letter of what they say."""
    for part, number in (("train", 170), ("test", 33)):
        for row, text in enumerate(texts(number, number)):
            file = folder / part / text[0] / f"{row:03}.wav"
            file.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(file, tones(text, row), RATE)
    return folder


def write_wav2vec2(folder: Path, tokens: str = LETTERS, classes: tuple[str, ...] = (), **settings: Any) -> Any:
    """A small Wav2Vec2 in a folder with its feature extractor; for texts with a tokenizer, or for classes. It has
    dropout, which the scripts of transformers switch off."""
    import transformers as hf

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    shape |= {"conv_dim": (16, 16), "conv_kernel": (64, 4), "conv_stride": (40, 2), "num_conv_pos_embeddings": 8}
    shape |= {"num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True}
    shape |= {"classifier_proj_size": 16, "ctc_loss_reduction": "mean"}
    if classes:
        shape |= {"id2label": dict(enumerate(classes)), "label2id": {name: row for row, name in enumerate(classes)}}
        model: Any = hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**shape | settings))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        names = ["<pad>", "<unk>", "|", *tokens]
        (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
        tokenizer = hf.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), bos_token=None, eos_token=None)
        tokenizer.save_pretrained(folder)
        model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**shape | settings, vocab_size=len(names), pad_token_id=0))
    model.save_pretrained(folder)
    hf.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True).save_pretrained(folder)
    return model


def write_whisper(folder: Path, languages: bool = True, **settings: Any) -> Any:
    """A small Whisper in a folder with its feature extractor and tokenizer, which has a token for each byte. It reads a
    second, knows English and German (or English alone), and has dropout. Returns (model, processor)."""
    import transformers as hf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    torch.manual_seed(0)
    codes = [f"<|{code}|>" for code in hf.models.whisper.tokenization_whisper.LANGUAGES] if languages else []
    special = ["<|endoftext|>", "<|startoftranscript|>", *codes, "<|translate|>", "<|transcribe|>", "<|startoflm|>"]
    special += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    vocabulary = {letter: number for number, letter in enumerate(sorted(bytes_to_unicode().values()))}
    tokenizer = hf.WhisperTokenizer(vocabulary, [])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:], "pad_token": special[0]})
    tokenizer.add_tokens([f"<|{0.02 * number:.2f}|>" for number in range(51)])
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special)))
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    shape: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16}
    shape |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.1, "max_source_positions": 50}
    shape |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_target_positions": 24, "bos_token_id": end}
    shape |= {"pad_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    shape |= {"suppress_tokens": None, "begin_suppress_tokens": None, "vocab_size": len(tokenizer)}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**shape | settings))
    known: dict[str, Any] = {"begin_suppress_tokens": [end], "suppress_tokens": [ids["<|nospeech|>"]]}
    known |= {"no_timestamps_token_id": ids["<|notimestamps|>"], "decoder_start_token_id": start, "max_length": 24}
    known |= {"forced_decoder_ids": [[1, None]]} | {f"{name}_token_id": end for name in ("bos", "eos", "pad")}
    if languages:
        known["lang_to_id"] = {code: ids[code] for code in ("<|en|>", "<|de|>")}
        known["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
    model.generation_config = hf.GenerationConfig(**known)
    model.save_pretrained(folder)
    processor = hf.WhisperProcessor(hf.WhisperFeatureExtractor(16, chunk_length=1), tokenizer)
    processor.save_pretrained(folder)
    return model, processor
