"""Promise: speech.py takes the steps of transformers' run_speech_recognition_ctc, run_speech_recognition_seq2seq and
run_audio_classification, has the error rates of jiwer, and exports what pipelines load, with the same result."""

import json
from pathlib import Path
from typing import Any

import jiwer
import numpy
import pytest
import soundfile
import torch

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.audio.recordings import Recording, Recordings, resample
from accelerate_recipes.common.tasks.audio.whisper import is_whisper, load_whisper
from accelerate_recipes.common.tasks.reading.labelled import Labelled
from support import peers
from support.audio import LETTERS, RATE, write_classes, write_recordings, write_wav2vec2, write_whisper
from support.launching import fork
from support.recipes import RECIPES
from support.runs import Run, assert_same_result, largest_difference, refused

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
    write_whisper(folder / "whisper")
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
    first = fork(run.output_dir, "single", SCRIPT, f"--predict {files('test')[0]}").stdout.splitlines()[0]
    assert first == f"{best[0]['label']}: {best[0]['score']:.1%}"


TARGETS = ["text", pytest.param("class", marks=pytest.mark.full)]


@pytest.mark.parametrize("target", TARGETS)
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
@pytest.mark.parametrize("target", TARGETS)
def test_one_result_of_a_pretrained_model(tmp_path: Path, folder: Path, config: str, target: str) -> None:
    flags = f"{flags_of(folder, target)} {SLOWLY}"
    stages = " --pipeline_stages 2" * ("pipeline" in config)
    expected = fork(tmp_path / "single", "single", SCRIPT, flags)
    assert_same_result(fork(tmp_path / config, config, SCRIPT, flags + stages), expected)


@pytest.mark.full
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


WHISPER_RATE = 16_000


def whisper_flags(folder: Path, model: Path | None = None) -> str:
    return flags_of(folder, "text").replace(str(folder / "ctc"), str(model or folder / "whisper"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Run:
    flags = f"{whisper_flags(folder)} --language German --max_steps 110 --save_predictions"
    return fork(tmp_path_factory.mktemp("trained") / "run", "single", SCRIPT, flags)


def wave_of(sample: dict[str, Any]) -> Any:
    return resample(Recording(sample["wave"], RATE, ""), WHISPER_RATE)


def written_in(run: Run) -> list[list[int]]:
    """The tokens of each text of the last evaluation."""
    return [json.loads(line)["written"] for line in (run.output_dir / "predictions.jsonl").read_text().splitlines()]


def test_texts_of_whisper(folder: Path, trained: Run) -> None:
    from transformers import AutoProcessor, WhisperForConditionalGeneration, pipeline

    def collate(samples: list[Any]) -> Any:
        waves = [wave_of(sample) for sample in samples]
        batch = processor(waves, sampling_rate=WHISPER_RATE, return_tensors="pt")
        labels = processor.tokenizer([sample["text"] for sample in samples], padding=True, return_tensors="pt")
        batch["labels"] = labels.input_ids.masked_fill(labels.attention_mask == 0, -100)[:, 1:]
        return batch

    model = WhisperForConditionalGeneration.from_pretrained(folder / "whisper", dropout=0.0).train()
    processor = AutoProcessor.from_pretrained(folder / "whisper")
    processor.tokenizer.set_prefix_tokens(language="german", task="transcribe")
    expected = peers.losses(model, read(folder, "train"), collate)
    assert largest_difference(trained.column("train/loss")[: peers.NUM_STEPS], expected) < peers.CLOSE

    hear = pipeline("automatic-speech-recognition", model=str(trained.output_dir / "model"))
    samples = read(folder, "test")
    texts = [hear({"raw": wave_of(sample), "sampling_rate": WHISPER_RATE})["text"] for sample in samples]
    ours = [processor.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written_in(trained)]
    assert ours == texts and len({*map(len, texts)}) > 2
    right = [sample["text"] for sample in samples]
    assert 0 < jiwer.cer(right, texts) < 0.95
    assert trained.column("eval/wer")[-1] == pytest.approx(jiwer.wer(right, texts), abs=1e-9)
    assert trained.column("eval/cer")[-1] == pytest.approx(jiwer.cer(right, texts), abs=1e-9)
    line = fork(trained.output_dir, "single", SCRIPT, f"--predict {folder}/texts/test/000.wav").stdout.strip()
    assert line == texts[0].strip()


@pytest.mark.parametrize(
    "config",
    [pytest.param(config, marks=pytest.mark.full) for config in ("ddp", "fsdp2", "deepspeed_zero3", "tensor_parallel")],
)
def test_one_result_of_whisper(tmp_path: Path, folder: Path, trained: Run, config: str) -> None:
    """Losses, weights, and texts of several lengths. The tokenizer's files name the language."""
    flags = f"{whisper_flags(folder, trained.output_dir / 'model')} {SLOWLY} --save_predictions --max_steps 5"
    expected, run = (fork(tmp_path / name, name, SCRIPT, flags) for name in ("single", config))
    assert_same_result(run, expected)
    assert written_in(run) == written_in(expected) and len({row.count(row[-1]) for row in written_in(run)}) > 2


@pytest.mark.full
def test_a_frozen_encoder(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import load_file

    flags = f"{whisper_flags(folder)} --language en --freeze_feature_encoder --max_steps 2"
    found = fork(tmp_path / "run", "single", SCRIPT, flags).weights
    before = load_file(folder / "whisper" / "model.safetensors")
    moved = {name for name in before if not found[name].equal(before[name])}
    assert moved and not any(".encoder." in name for name in moved)


def test_what_whisper_does_not_take(tmp_path: Path, folder: Path) -> None:
    """A line says what to type, or to cut the recording."""
    write_whisper(tmp_path / "english", languages=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "speech_to_text"}')

    def line(make: Any, *arguments: Any) -> str:
        with pytest.raises(UsageError) as error:
            make(*arguments)
        return str(error.value)

    whisper, english = str(folder / "whisper"), str(tmp_path / "english")
    knows = f"{whisper} knows 2 languages: use the language of the texts, such as --language german"
    assert line(load_whisper, whisper, None, "transcribe", 9) == f"--language is missing: {knows}"
    assert line(load_whisper, whisper, "French", "transcribe", 9) == f"--language french: {knows}"
    assert "has no languages in its" in line(load_whisper, english, "german", "transcribe", 9)
    assert "is a speech_to_text: use a Whisper or CTC model" in line(is_whisper, str(tmp_path / "other"))
    assert is_whisper(whisper) and not is_whisper(str(folder / "ctc")) and not is_whisper("no/such model")

    def first(seconds: float, text: str, *loaded: Any) -> dict[str, Any]:
        recording = Recording(numpy.zeros(int(seconds * WHISPER_RATE), numpy.float32), WHISPER_RATE, "a.wav")
        return Recordings(Labelled([recording], [text], []), *loaded)[0]

    loaded = load_whisper(whisper, "de", "translate", 9)
    tokens, start = loaded[2].convert_ids_to_tokens(first(1, "ab", *loaded)["labels"].tolist()), "<|startoftranscript|>"
    assert tokens == ["<|de|>", "<|translate|>", "<|notimestamps|>", "a", "b", "<|endoftext|>"]
    assert loaded[2].convert_ids_to_tokens(first(1, "ab", *loaded)["decoder_input_ids"][:2].tolist()) == [
        start,
        "<|de|>",
    ]
    assert line(first, 1.01, "ab", *loaded) == "a.wav is 1.01 s long, but the model reads 1 s: cut it into sentences"
    writes = "tokens, but the model writes at most 9"
    assert line(first, 1, "a" * 9, *loaded) == f"a.wav: its text has 10 {writes}: use --max_target_length 10"
    assert line(first, 1, "a" * 20, *loaded) == f"a.wav: its text has 21 {writes}: cut the recording"
    only = load_whisper(english, None, "transcribe", 225)
    assert only[2].convert_ids_to_tokens(first(1, "a", *only)["labels"].tolist()) == [
        "<|notimestamps|>",
        "a",
        "<|endoftext|>",
    ]
    assert only[0].generation_config.max_new_tokens == 22  # of 24 positions


def test_a_recording_that_is_too_long(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"file_name": f"{row}.wav", "transcription": "ab"} for row in range(40)]
    for row in range(40):
        soundfile.write(tmp_path / "data" / f"{row}.wav", numpy.zeros(9000 if row == 7 else 4000), RATE)
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = whisper_flags(folder).replace(str(folder / "texts"), str(tmp_path / "data")) + " --language german"
    line = refused(fork(tmp_path / "run", "single", SCRIPT, flags, succeeds=False))
    assert line == f"error: {tmp_path}/data/7.wav is 1.12 s long, but the model reads 1 s: cut it into sentences"


def test_a_language_is_for_whisper(tmp_path: Path, folder: Path) -> None:
    flags = f"{flags_of(folder, 'text')} --language german"
    line = refused(fork(tmp_path / "run", "single", SCRIPT, flags, succeeds=False))
    assert line == "error: --language german is for a Whisper model with --target text: leave it out"


@pytest.mark.full
def test_whisper_has_no_stages(tmp_path: Path, folder: Path) -> None:
    flags = f"{whisper_flags(folder)} --language german --pipeline_stages 2"
    line = refused(fork(tmp_path / "run", "pipeline_parallel", SCRIPT, flags, succeeds=False))
    assert "has two chains of layers" in line


@pytest.mark.full
def test_tones(tmp_path: Path) -> None:
    assert fork(tmp_path / "run", "ddp", SCRIPT).column("eval/wer")[-1] < 0.1
