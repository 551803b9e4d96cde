"""Writes and reads the exported model."""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..cpu_group import CpuGroup
from ..errors import RunError, UsageError
from ..failure import line_of
from ..files import give_usual_mode, replacing
from ..parallel.strategies import divides_weights
from ..records.output_dir import EVALUATION
from ..records.run_card import read_card
from ..step.engine import Engine
from ..step.setup import Setup
from ..weights.shards import checkpoint_tensors, load_tensors
from .format import MODEL_FILES, check_same_model, write_tensors

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names
MAX_FILE_BYTES = 5_000_000_000


def try_export(setup: Setup, group: CpuGroup) -> None:
    """Tests the export after the last step: the main process writes the small files and removes them, and
    checks that there is room for the weights. A collective. Raises UsageError if the export would fail."""
    output_dir, module, line = setup.plan.config.output_dir, setup.model, None
    dtype = export_dtype(setup.plan.config.export_dtype, module)
    settings: Any = getattr(module, "config", None)
    if hasattr(module, "from_pretrained"):
        settings.architectures = [type(module).__name__]  # sharding renames the class
    if group.rank == 0:
        weights = checkpoint_tensors(module).values()
        types = (dtype if dtype is not None and weight.is_floating_point() else weight.dtype for weight in weights)
        size = sum(weight.numel() * kind.itemsize for weight, kind in zip(weights, types))
        disk = shutil.disk_usage(output_dir)
        try:
            with TemporaryDirectory(dir=output_dir) as folder, _Reads(module) as reads:
                _write_small_files(module, Path(folder), dtype, setup.options.get("export"))
        except Exception as error:  # any error: `export` is the recipe's
            line = f"the model could not be exported after the last step ({line_of(error)}): fix this first"
        if line is None and reads.name and divides_weights(layout := setup.plan.layout):
            line = f"export reads {reads.name}, and {layout} divides weights: read {output_dir / 'model'} after fit"
        if disk.total and size > disk.free:  # some file systems do not say how large they are
            line = (
                f"--output_dir {output_dir} has room for {disk.free / 1e9:,.3f} GB, but the exported model takes "
                f"{size / 1e9:,.3f} GB: use a folder on a larger disk"
            )
    if (line := group.broadcast(line)) is not None:
        raise UsageError(line)


class _Reads(TorchDispatchMode):
    """Records the name of a weight of the module that the code in the `with` block reads."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.name, self._names = "", {id(weight): name for name, weight in module.named_parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = next((self._names[id(each)] for each in tree_leaves(args) if id(each) in self._names), self.name)
        return function(*args, **(kwargs or {}))


def export_model(engine: Engine, folder: Path, evaluation: dict[str, Any] | None = None) -> str | None:
    """Writes the weights to `<folder>/model.safetensors`, with the module's own names; above 5 GB into several files
    with an index. The main process writes them; no process holds more than one file and one tensor.

    A transformers model also gets its `config.json`, so that `from_pretrained(folder)` loads it. A model with a
    `peft_adapter` (common/tasks/models/lora.py) writes PEFT's files. `export` of `fit` may write more. `evaluation`:
    written to `evaluation.json`. The finished folder replaces an earlier one at once. Returns a digest of the weights,
    in the main process. Raises RunError if the weights cannot be written, or the files that belong to them.
    """
    weights, digest, problem = engine.each_whole(), None, None
    if engine.accelerator.is_main_process:
        dtype = export_dtype(engine.plan.config.export_dtype, engine.module)
        try:
            with rewrite(folder) as aside:
                digest = write_weights(weights, aside, dtype, getattr(engine.module, "peft_adapter", None))
                if evaluation is not None:
                    (aside / EVALUATION).write_text(json.dumps(evaluation, indent=2) + "\n", encoding="utf-8")
                try:
                    _write_small_files(engine.module, aside, dtype, engine.setup.options.get("export"))
                except Exception as error:  # any: `export` is the recipe's, and the weights are worth more
                    problem = f"{folder} has the weights, but lacks {_missing(folder, aside)} ({line_of(error)})"
        except RunError as error:
            problem = str(error)
    deque(weights, maxlen=0)  # takes part in the gathering
    if (problem := broadcast_object_list([problem])[0]) is not None:
        raise RunError(problem)
    return digest


def _missing(folder: Path, aside: Path) -> str:
    """The names of the files that the run wrote before its first step, and that are now missing or incomplete."""
    places = folder.parent / "checkpoints" / MODEL_FILES, aside
    before, now = ({path.relative_to(place): path.stat().st_size for path in place.rglob("*")} for place in places)
    return ", ".join(str(name) for name, size in sorted(before.items()) if now.get(name, -1) < size) or "a file"


@contextmanager
def rewrite(folder: Path) -> Iterator[Path]:
    """An empty folder to write into; afterwards it replaces `folder` in one step. Raises RunError if that fails."""
    try:
        with replacing(folder) as aside:
            yield aside
            for path in aside.rglob("*.safetensors"):  # of PEFT, or what `export` of `fit` wrote
                give_usual_mode(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{folder} cannot be written ({getattr(error, 'strerror', None) or error})") from None


def write_model(
    module: nn.Module, folder: Path, dtype: str, export: Callable[[Path], Any] | None, with_weights: bool = True
) -> None:
    """Writes the same files as `export_model`, for a model that one process holds; or all but the weights:
    `accelerate-recipes export` adds these files to the weights of a checkpoint. Raises RunError."""
    wanted = export_dtype(dtype, module)
    with rewrite(folder) as aside:
        if with_weights:
            write_weights(module.state_dict().items(), aside, wanted)
        _write_small_files(module, aside, wanted, export)


def export_dtype(wanted: str, module: nn.Module) -> torch.dtype | None:
    """The dtype of exported weights; None: their own. By default as in the config of a transformers model."""
    settings: Any = getattr(module, "config", None)
    if wanted == "auto" and hasattr(settings, "save_pretrained") and getattr(module, "peft_adapter", None) is None:
        wanted = str(settings.dtype).removeprefix("torch.")
    return getattr(torch, wanted, None)


def _write_small_files(
    module: nn.Module, folder: Path, dtype: torch.dtype | None, export: Callable[[Path], Any] | None
) -> None:
    """Writes the settings of a transformers or PEFT model, with the dtype of the weights; then calls `export`."""
    if (adapter := getattr(module, "peft_adapter", None)) is not None:
        adapter.write_settings(module, folder)
    else:
        for part in ("config", "generation_config"):
            settings: Any = getattr(module, part, None)
            if part == "generation_config" and hasattr(settings, "to_json_file"):
                settings.to_json_file(folder / f"{part}.json")  # save_pretrained refuses what from_pretrained takes
            elif hasattr(settings, "save_pretrained"):
                if part == "config" and dtype is not None:
                    settings = deepcopy(settings)  # the run continues with its own
                    settings.dtype = dtype
                settings.save_pretrained(folder)
    if export is not None:
        export(folder)


def write_weights(
    weights: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype | None, adapter: Any = None
) -> str:
    """Writes (name, tensor) of each weight as transformers does, in the memory of one file and one tensor, and returns
    a digest of them. Raises SafetensorError if the files cannot be written, ValueError for a type that they cannot
    hold. `dtype`: of the floating-point ones; None: each keeps its own. `adapter`: writes PEFT's file instead."""
    held, sizes, digest = dict[str, Tensor](), [0], 0
    files: list[list[str]] = []  # the names in each file
    for name, whole in weights:
        tensor = (whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole).cpu().contiguous()
        del whole  # not held while the next one is gathered
        if held and sizes[-1] + tensor.nbytes > MAX_FILE_BYTES and adapter is None:
            _write_file(folder, held, files)
            sizes.append(0)
        held[name] = tensor
        sizes[-1] += tensor.nbytes
        digest += _digest(name, tensor)
    if adapter is not None:
        adapter.write(held, folder)
    else:
        _write_file(folder, held, files)
        _name_files(folder, files, sum(sizes))
    return f"{digest % 2**64:016x}"


def _write_file(folder: Path, held: dict[str, Tensor], files: list[list[str]]) -> None:
    write_tensors(folder / str(len(files)), held, {"format": "pt"})  # transformers needs it
    files.append([*held])
    held.clear()


def _name_files(folder: Path, files: list[list[str]], size: int) -> None:
    """Gives the files their names, with an index if there are several."""
    total = len(files)
    paths = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" if total > 1 else WHOLE for number in range(total)]
    for number, path in enumerate(paths):
        (folder / str(number)).rename(folder / path)
    if total > 1:
        placed = {name: path for names, path in zip(files, paths) for name in names}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": placed}, indent=2)
        (folder / INDEX).write_text(text, encoding="utf-8")


def _digest(name: str, tensor: Tensor) -> int:
    """A digest of the name, type and bytes of a weight. It detects accidents, not forgeries."""
    digest = xxhash.xxh3_64(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    digest.update(content)
    return digest.intdigest()


def load_exported(output_dir: str | Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """{name: tensor} of the model that a run exported; also loads them into `model`, if given. Raises UsageError if
    there is none, it was altered, or it does not fit `model`."""
    folder = Path(output_dir) / "model"
    try:
        if model is not None and (adapter := getattr(model, "peft_adapter", None)):
            weights = adapter.read(folder, [*checkpoint_tensors(model)])
        else:
            weights = {name: weight for path in _files(folder) for name, weight in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(
            f"no exported model in {folder} ({reason}): train first, or use the --output_dir of a finished run"
        ) from None
    expected = read_card(Path(output_dir)).get("model_digest")
    if expected is not None and f"{sum(map(_digest, weights, weights.values())) % 2**64:016x}" != expected:
        raise UsageError(f"the weights in {folder} were altered after its run: train again")
    if model is not None:
        check_same_model(folder, {name: (list(each.shape), each.dtype) for name, each in weights.items()}, model)
        load_tensors(model, weights)
    return weights


def _files(folder: Path) -> list[Path]:
    """The files with the weights of an exported model. Raises OSError if its index cannot be read."""
    if not (folder / INDEX).exists():
        return [folder / WHOLE]
    try:
        placed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted({*placed.values()})]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OSError(f"{INDEX} is not valid") from None
