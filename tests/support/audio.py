"""Recordings in files, and a small Wav2Vec2."""

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


def write_recordings(folder: Path, column: str = "transcription") -> dict[str, list[str]]:
    """WAV files for training and evaluation beside metadata.jsonl. Returns {part: texts}."""
    found = {}
    for seed, (part, number) in enumerate({"train": 170, "test": 33}.items()):
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
