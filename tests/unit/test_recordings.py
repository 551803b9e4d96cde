"""Promise: a recording is what its file has, at the rate of the model, with its own text or class."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import soundfile
import torch

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.audio.characters import ErrorRates, tokenizer_of_texts
from accelerate_recipes.common.tasks.audio.recordings import (
    Recordings,
    check_padding,
    load_recordings,
    open_recording,
    resample,
)
from accelerate_recipes.common.tasks.reading.labelled import Labelled
from support.audio import LETTERS, RATE, tones, write_wav2vec2

Out = pytest.CaptureFixture[str]


def sine(rate: int, hertz: float = 440, seconds: float = 0.5) -> numpy.ndarray:
    return (0.5 * numpy.sin(2 * numpy.pi * hertz * numpy.arange(int(seconds * rate)) / rate)).astype(numpy.float32)


def load(data: Path, column: str = "text", texts: bool = True) -> tuple[Labelled, Labelled]:
    return load_recordings(str(data), "audio", column, str.strip if texts else None)


def write(folder: Path, number: int = 10) -> list[str]:
    """Files of different lengths. Returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in range(number):
        soundfile.write(folder / f"{row}.wav", sine(RATE, seconds=0.1 + row / 100), RATE)
    return [f"{row}.wav" for row in range(number)]


def test_folder_with_texts(tmp_path: Path, capfd: Out) -> None:
    for part, number in (("train", 4), ("test", 3)):
        names = write(tmp_path / part, number + 1)[:number]
        with (tmp_path / part / "metadata.csv").open("w") as file:
            rows = csv.writer(file)
            rows.writerows([("file_name", "text"), *((name, f"{part} {name[0]}") for name in names)])
    (tmp_path / "train" / "notes.txt").write_text("none")
    parts = load(tmp_path)
    assert [part.labels for part in parts] == [
        [f"train {row}" for row in range(4)],
        [f"test {row}" for row in range(3)],
    ]
    assert [len(sample.wave) for sample in parts[0].samples] == [800, 880, 960, 1040]
    left = capfd.readouterr().out
    assert "files without the name of a recording: 1, such as train/notes.txt" in left
    assert "recordings that metadata.csv does not name: 2, such as train/4.wav" in left
    with pytest.raises(
        UsageError, match=r"train/metadata.csv has no column words: use --text_column with one of file_n"
    ):
        load(tmp_path, "words")
    (tmp_path / "train" / "0.wav").unlink()
    with pytest.raises(UsageError, match=r"train/metadata.csv: row 1 names 0.wav: no such file"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_files_without_a_text_are_left_out(tmp_path: Path, capfd: Out, name: str) -> None:
    names = write(tmp_path)
    texts = ["" if row % 4 == 0 else f"text {row}" for row in range(10)]
    lines = ["file_name,text", *map(",".join, zip(names, texts))]
    if name == "metadata.jsonl":
        lines = [json.dumps({"file_name": file} | ({"text": text} if text else {})) for file, text in zip(names, texts)]
    (tmp_path / name).write_text("\n".join(lines))
    parts = load(tmp_path)
    assert sorted(text for part in parts for text in part.labels) == sorted(filter(None, texts))
    for part in parts:
        assert all(Path(one.name).stem == text[-1] for one, text in zip(part.samples, part.labels))
    assert "3 of 10 recordings have no text: left out" in capfd.readouterr().out
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=r"the recordings in .* have no texts: expected metadata.csv or"):
        load(tmp_path)


@pytest.mark.parametrize("lacks", ["column", "texts", "table"])
def test_a_part_without_texts_is_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Out, lacks: str
) -> None:
    """The path of the folder is relative."""
    for part, number in (("train", 4), ("validation", 3), ("test", 2)):
        rows = [{"file_name": name, "text": f"{part} {name[0]}"} for name in write(tmp_path / "own" / part, number)]
        if part == "test":
            rows = [{"file_name": row["file_name"]} | ({} if lacks == "column" else {"text": ""}) for row in rows]
        if part != "test" or lacks != "table":
            (tmp_path / "own" / part / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    parts = load(Path("own"))
    assert parts[1].labels == [f"validation {row}" for row in range(3)] and len(parts[0].samples[3].wave) == 1040
    assert "recordings in other folders: 2, such as test/0.wav" in capfd.readouterr().out


@pytest.mark.parametrize("below", ["wavs/{}/", ""])
def test_tables_of_splits_beside_the_recordings(tmp_path: Path, below: str) -> None:
    """Common Voice leaves out the name of its folder, clips."""
    for part, number in (("train", 4), ("dev", 3)):
        names = write(tmp_path / (below.format(part) or "clips"), number)
        rows = [f"{below.format(part)}{name}\t{part} {name[0]}" for name in names]
        (tmp_path / f"{part}.tsv").write_text("\n".join(["audio\ttext", *rows]))
    parts = load(tmp_path)
    assert [part.labels[-1] for part in parts] == ["train 3", "dev 2"] and len(parts[0].samples[3].wave) == 1040


def test_folders_of_classes(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        write(tmp_path / name)
    parts = load(tmp_path, "label", texts=False)
    assert [len(part.labels) for part in parts] == [18, 2] and parts[0].classes == ["cat", "dog"]
    for part in parts:
        assert all(
            Path(sample.name).parent.name == part.classes[label] for sample, label in zip(part.samples, part.labels)
        )


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_tables_with_paths(tmp_path: Path, capfd: Out, ending: str) -> None:
    names = write(tmp_path / "clips")
    rows = [{"audio": f"clips/{name}", "text": name[0]} for name in names]
    rows[7]["text"] = " "
    file = tmp_path / f"table.{ending}"

    def save() -> None:
        lines = ["audio,text", *(f"{row['audio']},{row['text']}" for row in rows)]
        file.write_text("\n".join(map(json.dumps, rows) if ending == "jsonl" else lines))

    save()
    parts = load(file)
    assert [len(part.labels) for part in parts] == [9 - 1, 1]
    assert all(
        len(sample.wave) == 800 + 80 * int(text) for part in parts for sample, text in zip(part.samples, part.labels)
    )
    assert "1 of 10 recordings have no text: left out" in capfd.readouterr().out
    rows[3]["audio"] = "clips/none.wav"
    save()
    with pytest.raises(UsageError, match=f"row 4 names clips/none.wav: no such file in {tmp_path}"):
        load(file)
    if ending == "jsonl":
        rows[3]["audio"] = 7  # type: ignore[assignment]
        save()
        with pytest.raises(UsageError, match=f"row 4 names 7: no such file in {tmp_path}"):
            load(file)
        rows[3]["audio"] = {"array": [0.25] * 999, "sampling_rate": RATE}  # type: ignore[assignment]
        save()
        with pytest.raises(UsageError, match=r"row 4 has an array, {'array': .{0,80}: expected a file$"):
            load(file)
    with pytest.raises(UsageError, match="has no column sound: use --audio_column with one of audio, text"):
        load_recordings(str(file), "sound", "text", str.strip)


@pytest.mark.parametrize("is_typed", [True, False])
def test_parquet(tmp_path: Path, is_typed: bool) -> None:
    """As `datasets` writes it: bytes beside the name of the file, and a class with a name; and from other tools."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    names = write(tmp_path / "clips")
    files = [{"bytes": (tmp_path / "clips" / name).read_bytes(), "path": name} for name in names]
    columns: dict[str, Any] = {"audio": files, "text": [name[0] for name in names], "label": [1, 0] * 5}
    kinds = {
        "audio": datasets.Audio(),
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["z", "a"]),
    }
    schema = datasets.Features(kinds).arrow_schema
    table = pyarrow.table(columns, schema=schema if is_typed else schema.remove_metadata())
    parquet.write_table(table, tmp_path / "train.parquet")
    parts = load(tmp_path / "train.parquet")
    assert [len(part.labels) for part in parts] == [9, 1]
    assert all(
        len(sample.wave) == 800 + 80 * int(text) for part in parts for sample, text in zip(part.samples, part.labels)
    )
    assert parts[0].samples[0].name == f"{parts[0].labels[0]}.wav"
    classes = load(tmp_path, "label", texts=False)[0]
    assert classes.classes == (["z", "a"] if is_typed else ["0", "1"])
    assert all(classes.labels[row] == 1 - int(classes.samples[row].name[0]) % 2 for row in range(9))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_paths_in_dicts_begin_at_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import pyarrow
    from pyarrow import parquet

    write(tmp_path / "elsewhere", 3)
    monkeypatch.chdir(tmp_path / "elsewhere")
    names = write(tmp_path)
    rows = [{"audio": {"bytes": None, "path": file}, "text": file[0]} for file in names]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert all(
        sample.name.startswith(f"{tmp_path}/{text}")
        for part in load(tmp_path / name)
        for sample, text in zip(part.samples, part.labels)
    )


@pytest.mark.parametrize("texts", [True, False])
def test_lists_are_no_text_of_a_recording(tmp_path: Path, texts: bool) -> None:
    rows = [{"file_name": name, "text": ["a"]} for name in write(tmp_path)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match=r"metadata.jsonl: row 1: expected text, found list \['a'\]"):
        load(tmp_path, texts=texts)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3", "PCM_U8", "PCM_24", "FLOAT"])
@pytest.mark.parametrize("rate", [44100, 16000, 11025])
def test_formats_rates_and_channels(tmp_path: Path, form: str, rate: int) -> None:
    """A stereo file of any rate is the same tone at the rate of the model."""
    wave, kind = sine(rate, 440), {"PCM_U8": "WAV", "PCM_24": "WAV", "FLOAT": "WAV"}.get(form, form)
    both = numpy.stack([1.5 * wave, 0.5 * wave], 1)
    soundfile.write(tmp_path / "a", both, rate, format=kind, subtype=form if kind != form else None)
    recording = open_recording(str(tmp_path / "a"), "a")
    assert (recording.rate, recording.wave.dtype) == (rate, numpy.float32)
    found, expected = resample(recording, RATE), sine(RATE, 440)
    assert found.dtype == numpy.float32 and abs(len(found) - len(expected)) < 0.2 * RATE  # MP3 adds silence
    spectrum = numpy.abs(numpy.fft.rfft(found))
    assert abs(spectrum.argmax() * RATE / len(found) - 440) < 4
    if kind != "MP3":
        middle = slice(200, min(len(found), len(expected)) - 200)
        assert numpy.abs(found[middle] - expected[middle]).max() < 0.03


def test_the_rate_of_the_model_changes_nothing(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", wave := sine(RATE), RATE, subtype="FLOAT")
    assert (resample(open_recording(str(tmp_path / "a.wav"), ""), RATE) == wave).all()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_feature_extractor_without_a_rate(tmp_path: Path) -> None:
    import transformers as hf

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    shape |= {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,)}
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**shape, vocab_size=5))
    with pytest.raises(UsageError, match=r"cannot take the smallest input .*preprocessor_config.json"):
        check_padding(model, hf.Wav2Vec2FeatureExtractor(sampling_rate=0))


def test_no_recordings(tmp_path: Path) -> None:
    def line(file: Any) -> str:
        with pytest.raises(UsageError) as error:
            open_recording(file, "x.wav")
        return str(error.value)

    (tmp_path / "text.wav").write_text("Hello")
    (tmp_path / "nothing.wav").write_bytes(b"")
    soundfile.write(tmp_path / "empty.wav", numpy.zeros(0), RATE)
    soundfile.write(tmp_path / "nan.wav", numpy.array([0, numpy.nan]), RATE, subtype="FLOAT")
    for name in ("text", "nothing", "none"):
        assert line(str(tmp_path / f"{name}.wav")).startswith("x.wav cannot be read (")
    assert line(b"RIFF").startswith("x.wav cannot be read (")
    assert " object at " not in line(b"RIFF") + line(str(tmp_path / "text.wav"))
    without = "x.wav cannot be read (it has neither bytes nor a path): expected WAV, FLAC, OGG or MP3"
    assert line({"bytes": None, "path": None}) == without
    noise = numpy.random.default_rng(0).standard_normal((3 * RATE, 2)) / 9
    for form in ("wav", "aiff", "au", "mp3", "ogg"):
        soundfile.write(tmp_path / f"half.{form}", noise, RATE)
        content = (tmp_path / f"half.{form}").read_bytes()
        half, last = line(content[: len(content) // 2]), line(content[:-100])
        if form != "ogg":  # whose pages tell their own size
            assert half == f"x.wav has {len(content) // 2:,} of the {len(content):,} bytes in its header: copy it again"
        assert last.endswith(f"of the {len(content):,} bytes in its header: copy it again") and half.endswith("again")
    image = b"ID3\3\0\0\0\0\0\7" + b"7" * 7  # in front of an MP3
    assert line(image + (tmp_path / "half.mp3").read_bytes()[:-100]).endswith("in its header: copy it again")
    soundfile.write(tmp_path / "loud.wav", 9830 * sine(RATE), RATE, subtype="FLOAT")
    assert line(str(tmp_path / "loud.wav")).startswith(
        "x.wav has numbers up to 4,915: expected -1 to 1; divide by 32768"
    )
    for name in ("empty", "nan"):
        assert line(str(tmp_path / f"{name}.wav")).startswith("x.wav is empty, or has numbers")
    for rate in (1, 999, 384_001):
        soundfile.write(tmp_path / "rate.wav", sine(RATE), rate)
        assert line(str(tmp_path / "rate.wav")).startswith(f"x.wav has {rate:,} samples per second: expected 1,000")
    with pytest.raises(UsageError, match=r"no data there; expected metadata.csv or metadata.jsonl"):
        (tmp_path / "folder").mkdir()
        load(tmp_path / "folder")


def test_samples(tmp_path: Path) -> None:
    from transformers import AutoFeatureExtractor, AutoTokenizer

    model = write_wav2vec2(tmp_path).eval()
    extractor, tokenizer = (each.from_pretrained(tmp_path) for each in (AutoFeatureExtractor, AutoTokenizer))
    for row, text in enumerate(["ab", "aa", "a" * 50, ""]):
        soundfile.write(
            tmp_path / f"{row}.wav", tones(text, 0)[: 900 - 800 * (text == "")] if text else sine(RATE)[:20], RATE
        )
    samples = [open_recording(str(tmp_path / f"{row}.wav"), f"{row}.wav") for row in range(4)]
    found = Recordings(Labelled(samples, ["ab", "aa", "a" * 50, "a"], []), model, extractor, tokenizer)
    assert found[0]["text"].tolist() == [3, 4]
    assert found[0]["frames"] == model(found[0]["input_values"][None]).logits.shape[1]
    assert abs(float(found[0]["input_values"].mean())) < 1e-6 and abs(float(found[0]["input_values"].std()) - 1) < 1e-2
    with pytest.raises(UsageError, match=r"2.wav is 0.11 s long, \d+ frames, but its text or class needs 99"):
        found[2]
    with pytest.raises(UsageError, match=r"3.wav is 0.00 s long, 0 frames, but its text or class needs 1"):
        found[3]


def test_error_rates_are_those_of_jiwer() -> None:
    import jiwer

    tokenizer, is_new = tokenizer_of_texts(None, right := ["ab cd", "e", "abc de e"])
    written = ["ab cde", "", "b de d e"]
    assert is_new and len(tokenizer) == 3 + len(LETTERS)

    def pad(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, value)

    frames = [[token for one in tokenizer(text).input_ids for token in (one, one, 0)] for text in written]
    best, labels = pad([[*row, 4] for row in frames], 5), pad([tokenizer(text).input_ids for text in right], -100)
    errors = ErrorRates(tokenizer)
    counts = errors.count(best, torch.tensor([len(row) for row in frames]), labels)
    assert counts.tolist() == [[1, 2, 1, 5], [1, 1, 1, 1], [2, 3, 4, 8]]
    rates = errors.rates({"errors": counts})
    assert rates["wer"] == pytest.approx(jiwer.wer(right, written)) and rates["cer"] == pytest.approx(
        jiwer.cer(right, written)
    )


@pytest.mark.parametrize(("package", "line"), [("soundfile", "recordings need"), ("jiwer", "error rates need")])
def test_a_missing_package_is_named(package: str, line: str) -> None:
    code = f"""import sys
sys.modules["{package}"] = None
from accelerate_recipes.common.tasks.audio import characters, recordings
recordings.open_recording("x", "x") if "{package}" == "soundfile" else characters.ErrorRates(None)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{line} {package}: run pip install 'accelerate-recipes[speech]'" in done.stderr


class Spectra:
    """A feature extractor: eight numbers for every 16 samples."""

    sampling_rate, model_input_names = RATE, ["input_features"]

    def __call__(self, wave: numpy.ndarray, **_: Any) -> dict[str, numpy.ndarray]:
        parts = wave[: len(wave) // 16 * 16].reshape(1, -1, 16)
        return {"input_features": numpy.abs(numpy.fft.rfft(parts))[..., 1:].astype(numpy.float32)}


def test_frames_of_a_model_that_reads_features(tmp_path: Path) -> None:
    """As many as Parakeet makes of spectra."""
    import transformers as hf

    encoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder |= {"num_mel_bins": 8, "subsampling_conv_channels": 4}
    model = hf.ParakeetForCTC(hf.ParakeetCTCConfig(vocab_size=5, pad_token_id=4, encoder_config=encoder)).eval()
    names = write(tmp_path, 3)
    opened = [open_recording(str(tmp_path / name), name) for name in names]
    for sample in Recordings(Labelled(opened, [0, 0, 0], ["a"]), model, Spectra()):
        given = sample["input_features"][None]
        mask = torch.ones(given.shape[:2], dtype=torch.long)
        assert model(given, attention_mask=mask).logits.shape[1] == sample["frames"] > 1
