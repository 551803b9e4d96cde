"""Recordings with a text or a class each: in folders, in tables, or on the Hub."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Subset

from ...data.collate import pad_to_longest
from ...data.facts import say
from ...errors import UsageError, first_line
from ...weights.on_disk import with_full_weights
from ..models.pretrained import must_take
from ..reading.labelled import Labelled, say_classes, with_same_classes
from ..reading.labelled_images import ImageFiles, Media, files_in, read_folder
from ..reading.sources import TABLES, hold_out, is_saved, load_tables, split_of
from ..reading.text_files import ending_of, local_path

ENDINGS = {".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".aifc", ".au"}
TEXTS = "expected metadata.csv or metadata.jsonl with the column file_name and the --text_column"
CLASSES = "expected a folder with a sub-folder for each class, such as cat/1.wav and dog/2.wav"
# {first bytes: (byte order and place of a size in the header, number of bytes that it does not count)}
SIZES: Any = {b"RIFF": ("little", 4, 8), b"FORM": ("big", 4, 8), b".snd": ("big", 8, 24)}
# The first frame of an MP3, if it tells the number of bytes from its own first one.
XING = re.compile(rb"\xff[\xe2-\xff].{10,40}?(?:Xing|Info)\0\0\0[\3\7\x0b\x0f].{4}(.{4})", re.DOTALL)
SLACK, STREAMED = 8, 2**31 - 2**16  # bytes: sizes are slightly wrong; or of a stream, which did not know its own
LOUDEST = 8  # above it, numbers with a fraction were not scaled; 1 is the usual maximum
ADVICE = "use --data tones for the embedded recordings, or the path of a folder, or of a .csv, .jsonl or .parquet file"


class Recording(NamedTuple):
    """The mean of the channels of a recording."""

    wave: Any  # float32 of shape (samples,), from -1 to 1
    rate: int  # samples a second
    name: str  # for messages


@dataclass(eq=False, repr=False)
class Recordings(Dataset):
    """Samples {the model's input: float32 of shape (samples,) or (frames, features); "frames": int, of the logits;
    "text": int64 of shape (tokens,), or "label": int}. Raises UsageError for a recording too short for its text. For
    Whisper, instead of frames and text: {"decoder_input_ids" and "labels": int64 of shape (tokens,), "weight": their
    number}. Raises UsageError for too long a recording or text."""

    source: Labelled  # of `Recording`s; labels are texts if there is a tokenizer
    model: Any  # of transformers, which says how many frames it makes
    extractor: Any  # makes the input of a wave
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        recording, label, rate = self.source.samples[index], self.source.labels[index], self.extractor.sampling_rate
        name, wave = self.extractor.model_input_names[0], wave_for(self.extractor, recording)
        values = torch.from_numpy(self.extractor(wave, sampling_rate=rate, return_tensors="np")[name][0])
        if self.tokenizer is not None and self.model.config.is_encoder_decoder:
            return {name: values} | self._to_write(label, recording.name)
        count = getattr(self.model, "_get_subsampling_output_length", int)  # of Parakeet and others that read features
        count = getattr(self.model, "_get_feat_extract_output_lengths", count)
        frames, needed, target = max(0, int(count(torch.tensor(len(values))))), 1, {"label": label}
        if self.tokenizer is not None:
            tokens = torch.tensor(self.tokenizer(label).input_ids)
            needed = len(tokens) + int((tokens[1:] == tokens[:-1]).sum())  # a blank is between equal tokens
            target = {"text": tokens}
        if frames < needed:
            what = f"{len(wave) / rate:.2f} s long, {frames} frames, but its text or class needs {needed}"
            raise UsageError(f"{recording.name} is {what}: correct the text or remove the recording")
        return {name: values, "frames": frames} | target

    def _to_write(self, text: str, name: str) -> dict[str, Any]:
        tokens, longest = self.tokenizer(text).input_ids, self.model.generation_config.max_new_tokens
        number, fits = len(tokens) - len(self.tokenizer.prefix_tokens), len(tokens) <= self.model.max_target_positions
        if number > longest:
            advice = f"use --max_target_length {number}" if fits else "cut the recording"
            raise UsageError(f"{name}: its text has {number} tokens, but the model writes at most {longest}: {advice}")
        given, labels = [self.model.config.decoder_start_token_id, *tokens[1:-1]], torch.tensor(tokens[1:])
        return {"decoder_input_ids": torch.tensor(given), "labels": labels, "weight": float(len(given))}


def freeze_reader(model: Any) -> None:
    """Freezes Whisper's encoder, or another model's convolutions. Raises UsageError for a model with neither."""
    freeze = getattr(model, "freeze_encoder", None) or getattr(model, "freeze_feature_encoder", None)
    if freeze is None:
        raise UsageError(f"--freeze_feature_encoder: {type(model).__name__} has no such encoder: remove the flag")
    freeze()


@torch.no_grad()
def check_padding(model: Any, extractor: Any) -> None:
    """Raises UsageError if padding changes a model's output for a recording, as with a mean over all of its frames."""
    name, rate, collate = extractor.model_input_names[0], extractor.sampling_rate, pad_to_longest()
    noise = torch.randn(2 * rate, generator=torch.Generator().manual_seed(0)).numpy()
    with must_take(model), with_full_weights(model.eval()):
        parts = noise[:rate], noise
        short, long = (extractor(part, sampling_rate=rate, return_tensors="pt")[name][0] for part in parts)
        alone, both = (model(**collate([{name: each} for each in batch])).logits for batch in ([short], [short, long]))
    if not torch.allclose(alone[0], both[0, : alone.shape[1]], 1e-3, 1e-5):
        raise UsageError(f"padding changes the result of {type(model).__name__}: use another, or --micro_batch_size 1")


def wave_for(extractor: Any, recording: Recording) -> Any:
    """The wave of a recording for a feature extractor. Raises UsageError if it would cut off the end."""
    wave, most = resample(recording, extractor.sampling_rate), getattr(extractor, "n_samples", None)
    if most and len(wave) > most:
        seconds = f"{len(wave) / extractor.sampling_rate:.2f} s long, but the model reads {extractor.chunk_length} s"
        raise UsageError(f"{recording.name} is {seconds}: cut it into sentences")
    return wave


def resample(recording: Recording, rate: int) -> Any:
    """The wave of a recording with `rate` samples per second."""
    from scipy.signal import resample_poly  # takes half a second; scikit-learn needs SciPy, too

    common = math.gcd(rate, recording.rate)
    return resample_poly(recording.wave, rate // common, recording.rate // common)


def open_recording(file: Any, name: str) -> Recording:
    """Opens a path; or bytes; or a dict with either. `name`: for messages. Raises UsageError."""
    try:
        import soundfile
    except ImportError:
        raise UsageError("recordings need soundfile: run pip install 'accelerate-recipes[speech]'") from None
    if isinstance(file, dict):
        name, file = file.get("path") or name, file.get("bytes") or file.get("path")
    try:
        content = file if isinstance(file, bytes) else local_path(file).read_bytes()
        waves, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except (RuntimeError, OSError, TypeError) as error:
        reason = getattr(error, "error_string", first_line(error)) if file else "it has neither bytes nor a path"
        raise UsageError(f"{name} cannot be read ({reason}): expected WAV, FLAC, OGG or MP3") from None
    if len(content) + SLACK < (said := _size_said(content)) < STREAMED:
        raise UsageError(f"{name} has {len(content):,} of the {said:,} bytes in its header: copy it again")
    if not 1000 <= rate <= 384_000:  # to resample takes minutes
        raise UsageError(f"{name} has {rate:,} samples per second: expected 1,000 to 384,000; correct its header")
    wave = waves.mean(1)
    if not len(wave) or not math.isfinite(wave.sum()):
        raise UsageError(f"{name} is empty, or has numbers that are not finite: remove it")
    if (peak := float(abs(waves).max())) > LOUDEST:
        raise UsageError(f"{name} has numbers up to {peak:,.0f}: expected -1 to 1; divide by 32768 if they had 16 bits")
    return Recording(wave, rate, name)


def _size_said(content: bytes) -> int:
    """How many bytes a file should have by its header, or by that of its last page; 0 if these do not tell."""
    if content[:4] in SIZES:
        order, place, more = SIZES[content[:4]]
        return int.from_bytes(content[place : place + 4], order) + more
    if content[:4] == b"OggS":
        place = content.rfind(b"OggS\0") + 27
        end = place + sum(content[place - 1 : place])  # of the lengths of the page's segments
        return end + sum(content[place:end])
    found = XING.search(content) if content[:1] == b"\xff" or content[:3] == b"ID3" else None
    return found.start() + int.from_bytes(found[1]) if found else 0


def load_recordings(
    data: str, audio_column: str, target_column: str, clean: Callable[[str], str] | None = None
) -> tuple[Labelled, Labelled]:
    """(training recordings, evaluation recordings), labelled with texts or class numbers. If the source has one part,
    one in ten is held out. Raises UsageError for unusable data.

    Args:
        data: a folder with metadata.csv or .jsonl, or a folder per class (in "train" and "test"); or as `load_tables`.
        audio_column: name of the column with files, or with paths from the folder of the table.
        target_column: name of the column with texts, which `clean` turns into labels; or with classes if it is None.
    """
    path, what, declared = local_path(data).absolute(), "text" if clean else "class", list[str]()
    columns, parts = list[Any](), list[Labelled]()
    tables = [each.name for each in path.iterdir() if ending_of(each) in TABLES] if path.is_dir() else []
    if path.is_dir() and not is_saved(path) and not any(split_of(Path(name)) for name in tables):
        kind = Media("recording", ENDINGS, (target_column,), *((TEXTS, "texts") if clean else (CLASSES, "classes")))
        columns = [[*map(list, zip(*files))] for files in read_folder(data, path, ADVICE, kind)]
    for table in [] if columns else load_tables(data, ADVICE, None, lambda table: table.has_classes(target_column)):
        table.check_columns({"--audio_column": audio_column, f"--{what}_column": target_column})
        declared = getattr(table.kinds.get(target_column), "names", declared)
        columns.append((files_in(data, table, audio_column), [*table.texts(target_column)]))
    for files, targets in columns:
        targets = [(clean or str.strip)(target or "") for target in targets]
        rows = [row for row, target in enumerate(targets) if target]
        if len(rows) < len(targets):
            say(f"--data {data}: {len(targets) - len(rows):,} of {len(targets):,} recordings have no {what}: left out")
        every: Any = ImageFiles(data, files, open_recording, "recording")
        samples, targets = Subset(every, rows), [targets[row] for row in rows]
        parts.append(Labelled(samples, targets, []) if clean else Labelled.of_names(samples, targets, declared))
    if len(parts) == 1:
        parts = [parts[0].part(ids) for ids in hold_out(len(parts[0].labels))]
    if not all(part.labels for part in parts):
        raise UsageError(f"--data {data} has no {what} for training or evaluation: expected two recordings or more")
    if clean is None:
        parts = with_same_classes(data, parts, "recording")
        say_classes(data, parts, "recording")
    return parts[0], parts[1]
