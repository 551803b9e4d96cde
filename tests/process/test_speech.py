"""Promise: speech.py takes the steps of transformers' run_speech_recognition_ctc and run_audio_classification, has the
error rates of jiwer, and exports what pipelines load, with the same result."""

import json
from pathlib import Path
from typing import Any

import jiwer
import numpy
import pytest
import soundfile
import torch

from support import peers
from support.audio import LETTERS, RATE, write_classes, write_recordings, write_wav2vec2
from support.launching import fork
from support.recipes import RECIPES
from support.runs import assert_same_result, largest_difference, refused

SCRIPT, _ = RECIPES["speech"]
SLOWLY = "--learning_rate 1e-3"  # at three times this rate Adam turns the rounding of a bias into 2e-5 of its way
OFF = ("attention_dropout", "hidden_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_recordings(folder / "texts")
    write_classes(folder / "classes")
    write_wav2vec2(folder / "ctc")
    write_wav2vec2(folder / "classifier", classes=tuple(LETTERS))
    return folder


def flags_of(folder: Path, target: str) -> str:
    more = f"--model_name_or_path {folder / ('ctc' if target == 'text' else 'classifier')} --target {target} "
    more += f"--data {folder / ('texts' if target == 'text' else 'classes')} --text_column transcription"
    return f"{peers.FLAGS} {more}"


def read(folder: Path, part: str) -> list[dict[str, Any]]:
    """Recordings with their texts, in the order of their names."""
    rows = [json.loads(line) for line in (folder / "texts" / part / "metadata.jsonl").read_text().splitlines()]
    waves = [soundfile.read(folder / "texts" / part / row["file_name"], dtype="float32")[0] for row in rows]
    return [{"wave": wave, "text": row["transcription"]} for wave, row in zip(waves, rows)]


def of_script(folder: Path, name: str, kind: Any) -> tuple[Any, Any]:
    """The model as the scripts of transformers load it, and its feature extractor. SpecAugment is off."""
    from transformers import AutoFeatureExtractor

    config = dict.fromkeys(OFF, 0.0) | {"apply_spec_augment": False}
    model = kind.from_pretrained(folder / name, **config).train()
    return model, AutoFeatureExtractor.from_pretrained(folder / name)


def test_texts(tmp_path: Path, folder: Path) -> None:
    from transformers import AutoModelForCTC, AutoTokenizer, pipeline

    run = fork(tmp_path / "run", "single", SCRIPT, flags_of(folder, "text") + " --max_steps 200")
    model, extractor = of_script(folder, "ctc", AutoModelForCTC)
    tokenizer = AutoTokenizer.from_pretrained(folder / "ctc")

    def collate(samples: list[Any]) -> Any:
        waves = [sample["wave"] for sample in samples]
        batch = extractor(waves, sampling_rate=RATE, padding=True, return_tensors="pt")
        labels = tokenizer([sample["text"] for sample in samples], padding=True, return_tensors="pt")
        batch["labels"] = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)
        return batch

    expected = peers.losses(model, read(folder, "train"), collate)
    assert largest_difference(run.column("train/loss")[: peers.NUM_STEPS], expected) < peers.CLOSE
    hear = pipeline("automatic-speech-recognition", model=str(run.output_dir / "model"))
    samples = read(folder, "test")
    written = [hear({"raw": sample["wave"], "sampling_rate": RATE})["text"] for sample in samples]
    right = [sample["text"] for sample in samples]
    assert 0 < jiwer.cer(right, written) < 0.9
    assert run.column("eval/wer")[-1] == pytest.approx(jiwer.wer(right, written), abs=1e-9)
    assert run.column("eval/cer")[-1] == pytest.approx(jiwer.cer(right, written), abs=1e-9)
    line = fork(run.output_dir, "single", SCRIPT, f"--predict {folder}/texts/test/000.wav").stdout.strip()
    assert line == written[0].strip()


def test_classes(tmp_path: Path, folder: Path) -> None:
    from transformers import AutoModelForAudioClassification, pipeline

    run = fork(tmp_path / "run", "single", SCRIPT, flags_of(folder, "class"))
    model, extractor = of_script(folder, "classifier", AutoModelForAudioClassification)

    def files(part: str) -> list[Path]:
        return sorted((folder / "classes" / part).rglob("*.wav"))

    def collate(paths: list[Path]) -> Any:
        waves = [soundfile.read(path, dtype="float32")[0] for path in paths]
        batch = extractor(waves, sampling_rate=RATE, padding=True, return_tensors="pt")
        return batch | {"labels": torch.tensor([LETTERS.index(path.parent.name) for path in paths])}

    expected = peers.losses(model, files("train"), collate)
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    hear = pipeline("audio-classification", model=str(run.output_dir / "model"))
    best = [hear({"raw": soundfile.read(path, dtype="float32")[0], "sampling_rate": RATE})[0] for path in files("test")]
    right = [path.parent.name == found["label"] for path, found in zip(files("test"), best)]
    assert run.column("eval/accuracy")[-1] == pytest.approx(float(numpy.mean(right)), abs=1e-6)
    first = fork(run.output_dir, "single", SCRIPT, f"--target class --predict {files('test')[0]}").stdout.splitlines()[
        0
    ]
    assert first == f"{best[0]['label']}: {best[0]['score']:.1%}"


@pytest.mark.parametrize("target", ["text", "class"])
def test_padding_changes_nothing(tmp_path: Path, folder: Path, target: str) -> None:
    flags = f"{flags_of(folder, target)} {SLOWLY}"
    expected = fork(tmp_path / "whole", "single", SCRIPT, flags)
    for size in (1, 4):
        run = fork(tmp_path / f"{size}", "single", SCRIPT, f"{flags} --micro_batch_size {size}")
        assert_same_result(run, expected)


@pytest.mark.parametrize(
    "config",
    [
        "fsdp2",
        *(
            pytest.param(config, marks=pytest.mark.full)
            for config in ("ddp", "tensor_parallel", "deepspeed_zero3", "pipeline_parallel", "fsdp2_pipeline")
        ),
    ],
)
@pytest.mark.parametrize("target", ["text", "class"])
def test_one_result_of_a_pretrained_model(tmp_path: Path, folder: Path, config: str, target: str) -> None:
    flags = f"{flags_of(folder, target)} {SLOWLY}"
    stages = " --pipeline_stages 2" * ("pipeline" in config)
    expected = fork(tmp_path / "single", "single", SCRIPT, flags)
    assert_same_result(fork(tmp_path / config, config, SCRIPT, flags + stages), expected)


def test_a_model_that_padding_changes(tmp_path: Path, folder: Path) -> None:
    """Its results are those of the same recordings alone."""
    write_wav2vec2(tmp_path / "group", feat_extract_norm="group")
    flags = flags_of(folder, "text").replace(str(folder / "ctc"), str(tmp_path / "group"))
    line = refused(fork(tmp_path / "refused", "single", SCRIPT, flags, succeeds=False))
    assert "use --micro_batch_size 1" in line
    expected, run = (fork(tmp_path / name, name, SCRIPT, f"{flags} --micro_batch_size 1") for name in ("single", "ddp"))
    assert_same_result(run, expected)


def test_tokens_that_a_model_lacks(tmp_path: Path, folder: Path) -> None:
    """The head is new, also if it has the same size."""
    write_wav2vec2(tmp_path / "upper", LETTERS.upper())
    flags = flags_of(folder, "text").replace(str(folder / "ctc"), str(tmp_path / "upper"))
    new = fork(tmp_path / "new", "single", SCRIPT, flags)
    assert f"the head is new: {tmp_path / 'upper'} has no tokens for '{LETTERS}'" in new.stdout
    vocabulary = json.loads((new.output_dir / "model" / "vocab.json").read_text())
    assert sorted(vocabulary, key=vocabulary.__getitem__)[-len(LETTERS) :] == [*LETTERS]
    kept = fork(tmp_path / "kept", "single", SCRIPT, flags + " --letters upper")
    assert "the head is new" not in kept.stdout
    same = fork(tmp_path / "same", "single", SCRIPT, flags_of(folder, "text"))  # with the weights of the same seed
    assert largest_difference(kept.column("train/loss"), same.column("train/loss")) < peers.CLOSE
    assert abs(new.column("train/loss")[0] - same.column("train/loss")[0]) > 1e-3


@pytest.mark.full
def test_tones(tmp_path: Path) -> None:
    assert fork(tmp_path / "run", "ddp", SCRIPT).column("eval/wer")[-1] < 0.1
