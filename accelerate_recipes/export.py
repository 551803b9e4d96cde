"""`accelerate-recipes export`: turns a checkpoint into a model, in one process, with the memory of one file."""

import json
import shutil
import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, print_json
from accelerate_recipes.paths import check_new_folder

if TYPE_CHECKING:
    from accelerate_recipes.common.checkpoint.reader import Reader

Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16"])


def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a checkpoint or of a run (then its newest checkpoint)")],
    folder: Annotated[Path, typer.Argument(help="the folder to make; it must be empty or absent")],
    dtype: Annotated[Dtype, typer.Option(help="dtype of the weights; auto: as the run exports them")] = Dtype.auto,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint as a model, like the one that a run writes at its end, in one process.

    Example: accelerate-recipes export outputs/mnist/checkpoints/step_00000100 mnist_100
    """
    try:
        check_new_folder(folder)
        with redirect_stdout(sys.stderr):  # lines about damaged checkpoints
            reader = _opened(checkpoint)
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        files = _write(reader, folder.resolve(), dtype)
    except OSError as error:
        raise UsageError(f"{checkpoint} or {folder} cannot be used ({error.strerror}): use other folders") from None
    made = {"checkpoint": str(reader.folder), "step": reader.content["state"]["step"], "folder": str(folder)}
    if not files.is_dir():
        print(f"{files} is missing: {folder} has only the weights", file=sys.stderr)
    print_json(made) if as_json else print(f"exported: step {made['step']} of {checkpoint} to {folder}")


def _opened(checkpoint: Path) -> "Reader":
    """The verified checkpoint. Raises UsageError if it is damaged, or if there is none."""
    from accelerate_recipes.common.checkpoint.format import MANIFEST, DamagedError
    from accelerate_recipes.common.checkpoint.reader import Reader
    from accelerate_recipes.common.checkpoint.resume import newest
    from accelerate_recipes.common.cpu_group import CpuGroup

    if (checkpoint / MANIFEST).exists():
        try:
            return Reader.open_verified(checkpoint, CpuGroup())
        except DamagedError as error:
            advice = "use the run's output folder for its newest complete one"
            raise UsageError(f"{checkpoint} is not a complete checkpoint ({error}): {advice}") from None
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is not a folder: use the folder of a checkpoint or of a run")
    try:
        reader = newest(checkpoint, Reader.open_verified, CpuGroup())
    except DamagedError as error:
        raise UsageError(f"{error}: nothing can be exported from it") from None
    if reader is not None:
        return reader
    raise UsageError(f"no checkpoint in {checkpoint}: use the folder of a run, or RUN/checkpoints/step_...")


def _write(reader: "Reader", folder: Path, dtype: str) -> Path:
    """Writes the model. Returns the folder of its small files, which may be missing."""
    import torch

    from accelerate_recipes.common.checkpoint.exported import rewrite, write_weights
    from accelerate_recipes.common.checkpoint.format import MODEL_FILES

    wanted = reader.content["export_dtype"] if dtype == "auto" else dtype
    files, base = reader.folder.resolve().parent / MODEL_FILES, reader.content["identity"].get("base")
    adapter: Any = None
    if base is not None:
        from accelerate_recipes.common.tasks.models.lora import Adapter

        adapter = Adapter(None, base)  # the settings are among the small files
    settings = files / "config.json"
    try:
        config = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
    except ValueError as error:
        raise UsageError(f"{settings} is damaged ({error}): copy the config.json of the model there") from None
    with rewrite(folder) as aside:
        if files.is_dir():
            shutil.copytree(files, aside, dirs_exist_ok=True)
        names = [key.removeprefix("model.") for key in reader.tensors if key.startswith("model.")]
        # As in the run's own export: the averages in place of the weights, if there are any.
        keys = {name: f"{'average' if f'average.{name}' in reader.tensors else 'model'}.{name}" for name in names}
        weights = ((name, reader.tensor(key)) for name, key in keys.items())
        write_weights(weights, aside, getattr(torch, str(wanted), None), adapter)
        if dtype != "auto" and "model_type" in config:
            text = json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True)
            (aside / settings.name).write_text(f"{text}\n", encoding="utf-8")
    return files
