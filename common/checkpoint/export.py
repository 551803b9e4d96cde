"""Writes and reads the exported model."""

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoint.writer import flush
from common.errors import RunError
from common.parallel.trainer import Trainer


def export_model(trainer: Trainer, folder: Path) -> None:
    """Writes the weights to `<folder>/model.safetensors`, with the module's own names and dtypes.

    A transformers model also gets its `config.json`, so that `from_pretrained(folder)` loads it.

    Raises:
        RunError: the files cannot be written.
    """
    weights = trainer.full_weights()
    if trainer.accelerator.is_main_process:
        aside = folder.with_name(f"{folder.name}.unfinished")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})  # transformers needs it
            config: Any = getattr(trainer.module, "config", None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(aside)
            flush(aside / "model.safetensors")
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder} cannot be written ({getattr(error, 'strerror', None) or error})") from None
    trainer.accelerator.wait_for_everyone()


def load_exported(output_dir: str | Path) -> dict[str, Tensor]:
    """{name: tensor} of the model that `export_model` wrote."""
    return load_file(Path(output_dir) / "model" / "model.safetensors")
