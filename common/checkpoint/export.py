"""Writes and reads the exported model."""

import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import RunError, UsageError
from ..files import give_usual_mode, replace_folder
from ..parallel.engine import Engine
from ..parallel.parts import kept_tensors
from ..records.run_card import read_card
from .format import check_same_model


def export_model(engine: Engine, folder: Path, export: Callable[[Path], Any] | None = None) -> int | None:
    """Writes the weights to `<folder>/model.safetensors`, with the module's own names and dtypes.

    A transformers model also gets its `config.json`, so that `from_pretrained(folder)` loads it. A model with
    a `peft_adapter` (common/tasks/lora.py) writes PEFT's files.

    Args:
        engine: holds the weights.
        folder: replaced at once by the finished one.
        export: writes more files into the folder, in the main process.

    Returns:
        A checksum of the weights, in the main process.

    Raises:
        RunError: the files cannot be written.
    """
    weights = engine.full_weights()
    if engine.accelerator.is_main_process:
        aside = folder.with_name(f"{folder.name}.unfinished")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            _write(engine.module, weights, aside)
            if export is not None:
                export(aside)
            for path in aside.rglob("*.safetensors"):
                give_usual_mode(path)
            replace_folder(aside, folder)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder} cannot be written ({getattr(error, 'strerror', None) or error})") from None
    engine.accelerator.wait_for_everyone()
    return _checksum(weights) if engine.accelerator.is_main_process else None


def _checksum(weights: Mapping[str, Tensor]) -> int:
    """Of names, types and bytes; it finds accidents, not forgeries."""
    checksum = 0
    for name, weight in sorted(weights.items()):
        checksum = zlib.crc32(f"{name} {weight.dtype} {tuple(weight.shape)}".encode(), checksum)
        checksum = zlib.crc32(weight.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _write(module: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes the files of the model."""
    if adapter := getattr(module, "peft_adapter", None):
        adapter.write(weights, folder)
        return
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # transformers needs it
    for part in ("config", "generation_config"):  # of a model of transformers
        settings: Any = getattr(module, part, None)
        if hasattr(settings, "save_pretrained"):
            settings.save_pretrained(folder)


def load_exported(output_dir: str | Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """{name: tensor} of the model that a run exported; also loads them into `model`, if given.

    Raises:
        UsageError: there is none, it was altered, or `model` is another one.
    """
    folder = Path(output_dir) / "model"
    try:
        if model is not None and (adapter := getattr(model, "peft_adapter", None)):
            weights = adapter.read(folder, [*kept_tensors(model)])
        else:
            weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(
            f"no exported model in {folder} ({reason}): train first, or type the --output_dir of a run that is done"
        ) from None
    expected = read_card(Path(output_dir)).get("model_crc32")
    if expected is not None and _checksum(weights) != expected:
        raise UsageError(f"the weights in {folder} were altered after its run: train again")
    if model is not None:
        check_same_model(folder, {name: list(weight.shape) for name, weight in weights.items()}, model)
        model.load_state_dict(weights, strict=False)  # adapters are not all weights
    return weights
