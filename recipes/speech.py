"""Write down what recordings say, or find their classes: a small Wav2Vec2 from scratch, or a pretrained model.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/speech.py

Data: telephone numbers as the tones of their keys, with noise; a long pause is a space. Or your own recordings (WAV,
FLAC, OGG, MP3) with texts or classes: a folder, a CSV, JSON-lines or parquet file, or a Hub id.
Expect: 1 % of the groups of digits in 500 other numbers are wrong (word error rate), as is 1 % of the characters.
Time: a minute on two CPU cores.

To continue from a pretrained model with your texts (classes: --target class; Whisper: --language german), and try it:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/speech.py --data path/to/folder \\
        --text_column transcription --model_name_or_path path/or/hub-id --learning_rate 1e-4 --freeze_feature_encoder
    python recipes/speech.py --predict path/to/recording.wav
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from accelerate_recipes import RunConfig, Schedule, UsageError, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, ForwardStep, pad_to_longest
from accelerate_recipes.common.tasks.audio import recordings
from accelerate_recipes.common.tasks.audio.characters import ErrorRates, tokenizer_of_texts
from accelerate_recipes.common.tasks.audio.tones import RATE, dial
from accelerate_recipes.common.tasks.audio.whisper import is_whisper, load_whisper
from accelerate_recipes.common.tasks.models import pretrained
from accelerate_recipes.common.tasks.models.encoder import freeze_key_biases
from accelerate_recipes.common.tasks.reading.labelled import Labelled, config_of_classes, names_of, with_classes
from accelerate_recipes.common.tasks.reading.mixture import Sources


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "tones"
    epochs: int = 8
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    weight_decay: float = 0.01
    log_every: int = 50
    target: Literal["text", "class"] = flag("text", "what to find in a recording")
    audio_column: str = flag("audio", "name of the column with the recordings, or with their paths")
    text_column: str = flag("text", "name of the column with the texts")
    class_column: str = flag("label", "name of the column with the classes")
    letters: Literal["as_is", "lower", "upper"] = flag("as_is", "case of the texts")
    ignored_characters: str = flag("", "characters to remove from the texts, such as ',.?!'")
    sampling_rate: int = flag(RATE, "samples a second; a pretrained model has its own", minimum=1000)
    hidden_size: int = flag(64, "width of the model", minimum=4)
    num_layers: int = flag(2, "layers of the model", minimum=1)
    model_name_or_path: str | None = flag(None, "continue from this model (folder or Hub id)")
    freeze_feature_encoder: bool = flag(False, "do not train the convolutions that read the wave, or Whisper's encoder")
    language: str | None = flag(None, "language of the texts, for a multilingual Whisper, such as german")
    task: Literal["transcribe", "translate"] = flag("transcribe", "for Whisper; translate: the texts are in English")
    max_target_length: int = flag(225, "most tokens of a text, for Whisper, and most that it writes", minimum=1)
    predict: str | None = flag(None, "instead of training, try the model in --output_dir on the recording at this path")


def make_forward_step(name: str, errors: Any, shape: Any) -> ForwardStep:
    """`forward_step` for texts, or for classes without error rates. `name`: of the input; `shape`: a model's config."""

    def forward_step(model: Any, batch: Batch) -> dict[str, Tensor]:
        """The loss of each recording; for a text, the CTC loss divided by the number of its tokens."""
        logits = model(**{name: batch[name]}, attention_mask=batch["attention_mask"]).logits.float()
        if errors is None:
            accuracy = (logits.argmax(-1) == batch["label"]).float()
            return {"loss": F.cross_entropy(logits, batch["label"], reduction="none"), "accuracy": accuracy}
        text, frames, scores = batch["text"], batch["frames"], logits.log_softmax(-1).transpose(0, 1)
        lengths = (text >= 0).sum(1)
        losses = F.ctc_loss(scores, text.clamp(min=0), frames, lengths, errors.blank, reduction="none")
        values = {"loss": losses / lengths}
        return values if model.training else values | {"errors": errors.count(logits.argmax(-1), frames, text)}

    def write(model: Any, batch: Batch) -> dict[str, Tensor]:
        """The mean loss of each text's tokens. In an evaluation also what the model writes."""
        logits = model(batch[name], decoder_input_ids=batch["decoder_input_ids"], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        values = {"loss": losses.sum(1) / batch["weight"]}
        if not model.training:
            with pretrained.silent():  # all 30 s at once, with as many passes in each process
                tokens = model.generate(batch[name], force_unique_generate_call=True, synced_gpus=None)
            tokens = F.pad(tokens, (0, shape.max_target_positions - tokens.shape[1]), value=shape.eos_token_id)
            values |= {"written": tokens, "errors": errors.count(tokens, (tokens >= 0).sum(1), batch["labels"])}
        return values

    return write if errors is not None and shape.is_encoder_decoder else forward_step


def build(config: Config, parts: list[Labelled]) -> tuple[Any, Any, Any]:
    """Returns (model, its feature extractor, its tokenizer). Raises UsageError for a wrong path."""
    path, is_class, classes = config.model_name_or_path, config.target == "class", parts[0].classes
    tokenizer, is_new, options = None, False, config_of_classes(classes) if is_class else dict[str, Any]()
    whisper = path if path and not is_class and is_whisper(path) else None
    if config.language and not whisper:
        raise UsageError(f"--language {config.language} is for a Whisper model with --target text: leave it out")
    if not is_class and not whisper:
        known = str(config.output_dir / "model") if config.evaluate_only else path
        tokenizer, is_new = tokenizer_of_texts(known, [text for part in parts for text in part.labels])
        options = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    kind: Any = transformers.AutoModelForAudioClassification if is_class else transformers.AutoModelForCTC
    if whisper:
        model, extractor, tokenizer = load_whisper(whisper, config.language, config.task, config.max_target_length)
    elif path is not None:
        read = partial(pretrained.load, kind, path, "model for recordings", reads=transformers.AutoFeatureExtractor)
        model, extractor, _ = with_classes(read, path, classes) if is_class else read(**options)
        if is_new:
            model.lm_head.reset_parameters()
    else:
        rate, width = config.sampling_rate, config.hidden_size
        if width % 4:
            raise UsageError(f"--hidden_size {width}: expected a multiple of 4, the number of attention heads")
        options |= {"conv_kernel": (rate // 64, 4), "conv_stride": (rate // 200, 2), "conv_dim": (width // 2,) * 2}
        options |= {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": config.num_layers}
        options |= {"num_attention_heads": 4, "num_conv_pos_embeddings": 16, "mask_time_prob": 0.0}
        options |= {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "num_conv_pos_embedding_groups": 4}
        model = kind.from_config(transformers.Wav2Vec2Config(**options))
        extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=rate, return_attention_mask=True)
    if config.freeze_feature_encoder:
        recordings.freeze_reader(model)
    if config.micro_batch_size != 1 and not whisper:  # Whisper always reads 30 s
        recordings.check_padding(model, extractor)
    pretrained.switch_off_dropout(model)  # SpecAugment, too
    freeze_key_biases(model)
    return model, extractor, tokenizer


def predict(config: Config, path: str) -> None:
    """Prints what the exported model hears in a recording."""
    kind = transformers.AutoConfig.from_pretrained(pretrained.exported_folder(config.output_dir)).architectures[0]
    task = "audio-classification" if "Classification" in kind else "automatic-speech-recognition"
    hear = pretrained.exported_pipeline(task, config.output_dir)
    wave = recordings.wave_for(hear.feature_extractor, recordings.open_recording(path, path))
    found = hear({"raw": wave, "sampling_rate": hear.feature_extractor.sampling_rate})
    print_once(found["text"] if "text" in found else "\n".join(f"{it['label']}: {it['score']:.1%}" for it in found))


def main(config: Config) -> None:
    """Trains the model, or prints what is in a recording."""
    if config.predict is not None:
        return predict(config, config.predict)
    accelerator, is_class = start(config), config.target == "class"

    def clean(text: str) -> str:
        kept = " ".join(text.translate(dict.fromkeys(map(ord, config.ignored_characters))).split())
        return {"lower": kept.lower(), "upper": kept.upper()}.get(config.letters, kept)

    def read(data: str) -> tuple[Labelled, Labelled]:
        if data == "tones":
            return dial(2000, 0, is_class), dial(500, 1, is_class)
        columns = config.audio_column, config.class_column if is_class else config.text_column
        return recordings.load_recordings(data, *columns, clean=None if is_class else clean)

    sources = Sources(config, read, ("classes",))
    model, extractor, tokenizer = build(config, [part for both in sources.parts.values() for part in both])
    classes = names_of(model.config)  # a pretrained head that has these classes keeps its order

    def heard(part: Labelled) -> recordings.Recordings:
        return recordings.Recordings(part.reorder(classes) if is_class else part, model, extractor, tokenizer)

    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    is_ctc = not model.config.is_encoder_decoder
    errors = ErrorRates(tokenizer, is_ctc) if tokenizer else None
    kind: Any = transformers.Wav2Vec2Processor if is_ctc else transformers.WhisperProcessor
    options: dict[str, Any] = {"collate_fn": pad_to_longest({"text": -100, "labels": -100})}
    options |= {"examples": errors.rates} if errors else {}
    options |= {"export": pretrained.export_of(model, kind(extractor, tokenizer) if tokenizer else extractor)}
    forward_step = make_forward_step(extractor.model_input_names[0], errors, model.config)
    fit(accelerator, model, optimizer, forward_step, *sources.sets(heard), config, **options)


if __name__ == "__main__":
    run(main, Config)
