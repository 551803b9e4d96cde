"""Writes and reads the exported model."""

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.checkpoint.format import check_same_model
from common.checkpoint.writer import flush
from common.errors import RunError, UsageError
from common.parallel.parts import kept_tensors
from common.parallel.trainer import Trainer


def export_model(trainer: Trainer, folder: Path) -> None:
    """Writes the weights to `<folder>/model.safetensors`, with the module's own names and dtypes.

    A transformers model also gets its `config.json`, so that `from_pretrained(folder)` loads it. A model with
    a `peft_adapter` (common/models/lora.py) writes PEFT's files.

    Raises:
        RunError: the files cannot be written.
    """
    weights = trainer.full_weights()
    if trainer.accelerator.is_main_process:
        aside = folder.with_name(f"{folder.name}.unfinished")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            flush(_write(trainer.module, weights, aside))
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder} cannot be written ({getattr(error, 'strerror', None) or error})") from None
    trainer.accelerator.wait_for_everyone()


def _write(module: nn.Module, weights: dict[str, Tensor], folder: Path) -> Path:
    """Writes the files of the model; returns the path of the one with the weights."""
    if adapter := getattr(module, "peft_adapter", None):
        return adapter.write(weights, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # transformers needs it
    for part in ("config", "generation_config"):  # of a model of transformers
        settings: Any = getattr(module, part, None)
        if hasattr(settings, "save_pretrained"):
            settings.save_pretrained(folder)
    return folder / "model.safetensors"


def load_exported(output_dir: str | Path) -> dict[str, Tensor]:
    """{name: tensor} of the model that `export_model` wrote."""
    return load_file(Path(output_dir) / "model" / "model.safetensors")


def load_exported_into(model: nn.Module, output_dir: Path) -> None:
    """Loads the exported weights into the bare module. Raises UsageError if there are none, or for another model."""
    folder = output_dir / "model"
    try:
        adapter = getattr(model, "peft_adapter", None)
        weights = adapter.read(folder, [*kept_tensors(model)]) if adapter else load_exported(output_dir)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(
            f"--evaluate_only: no exported model in {folder} ({reason}): train first, or type the --output_dir of a "
            "run that is done"
        ) from None
    check_same_model(folder, {name: list(weight.shape) for name, weight in weights.items()}, model)
    model.load_state_dict(weights, strict=False)  # adapters are not all weights
