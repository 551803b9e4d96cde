"""Checkpoints and the exported model: when they are written, which one is taken, and what is in them."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args, get_type_hints

import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.config import RunConfig
from common.errors import RunError, UsageError
from common.group import CpuGroup
from common.output_dir import checkpoints
from common.plan import Plan
from common.random_state import random_state, set_random_state
from common.shards import full_weights, load_state, state_parts
from common.state import TrainState
from common.step import Trainer
from common.storage import MANIFEST, DamagedError, Part, Reader, Shard, WriteError, flush, own_shard, remove, write


@dataclass
class Checkpoint:
    """A checkpoint found on disk and verified.

    Attributes:
        path: its folder.
        reader: of it.
        trained: names of the weights that the optimizer of this run was given.
    """

    path: Path
    reader: Reader
    trained: list[str]

    @property
    def state(self) -> TrainState:
        """Where the run was."""
        return TrainState(**self.reader.content["state"])

    def load_weights(self, model: nn.Module) -> None:
        """Loads the weights into the bare module, before `prepare`. Raises UsageError for another model."""
        own = model.state_dict()
        shapes = {
            name.removeprefix("model."): tensor["shape"]
            for name, tensor in self.reader.tensors.items()
            if name.startswith("model.")
        }
        if shapes.keys() != own.keys():
            name = min(shapes.keys() ^ own.keys())
            raise UsageError(f"{self.path} is of another model: only one of the two has {name}")
        for name, shape in shapes.items():
            if shape != list(own[name].shape):
                raise UsageError(
                    f"{self.path} is of another model: {name} is {shape} there, {list(own[name].shape)} here"
                )
        model.load_state_dict({name: self.reader.tensor(f"model.{name}") for name in shapes})

    def load_rest(self, trainer: Trainer, state: TrainState, group: CpuGroup) -> None:
        """Loads all but the weights, after `prepare`: the optimizer's state, averages, the loss scale, and
        what each process had of its own, its random state and the sums of the record that is under way."""
        content = self.reader.content
        load_state(trainer, self.reader)
        trainer.load_numbers(content["trainer"])
        accelerator, here = trainer.accelerator, layout(trainer.plan, group)
        there = {name: content["layout"][name] for name in here}  # an older checkpoint tells more
        accelerator.print(f"resumed from {self.path}")
        have_state = {name.rpartition(".")[0] for name in self.reader.tensors if name.startswith("optimizer.")}
        anew = [name for name in self.trained if f"optimizer.{name}" not in have_state]
        if have_state and anew:  # right for a weight that no forward pass has used
            accelerator.print(f"it has no state of the optimizer for {', '.join(anew)}: there it begins anew")
        if there == here:
            self._load_process(group.rank, state, accelerator.device)
            prefix = f"process_{group.rank:05d}."
            names = [key.removeprefix(prefix) for key in self.reader.tensors if key.startswith(prefix + "random.")]
            set_random_state({name: self._of_process(group.rank, name) for name in names})
        else:
            if group.rank == 0:  # who has the sums makes no difference, but how often they are there
                factor = _replicas(here) / _replicas(there)
                for rank in range(there["processes"]):
                    self._load_process(rank, state, accelerator.device, factor)
            seed = trainer.plan.config.seed + state.step * 1009 + trainer.plan.share
            set_seed(seed % 2**32)
            accelerator.print(
                f"it was saved by {_described(there)} and goes on in {_described(here)}: samples and schedule go on, "
                "random states (dropout) are seeded anew, with seed + 1009 × step + process"
            )
        self.reader.close()

    def _load_process(self, rank: int, state: TrainState, device: torch.device, factor: float = 1.0) -> None:
        state.losses += list(self._of_process(rank, "losses").to(device) * factor)
        state.weights += (self._of_process(rank, "weights") * factor).tolist()

    def _of_process(self, rank: int, name: str) -> Tensor:
        return self.reader.tensor(f"process_{rank:05d}.{name}")


def layout(plan: Plan, group: CpuGroup) -> dict[str, int]:
    """Which processes see the same samples: where it is the same, each goes on with its own random state.

    Returns:
        The number of processes, of shares of the samples among them, and of pipeline stages.
    """
    return {"processes": group.size, "shares": plan.num_shares, "stages": plan.config.pipeline_stages}


def _replicas(layout: dict[str, int]) -> int:
    """How many processes count the same loss: those of a tensor-parallel group."""
    return layout["processes"] // (layout["shares"] * layout["stages"])


def _described(layout: dict[str, int]) -> str:
    processes, shares = layout["processes"], layout["shares"]
    groups = f" in {shares} group{'s' * (shares > 1)}" if shares < processes else ""
    return f"{processes} process{'es' * (processes > 1)}{groups}"


def identity(plan: Plan, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What must be the same for a run to go on as itself."""
    config = asdict(plan.config)
    return {name: config[name] for name in ("seed", "batch_size", "data", "ema_decay")} | {
        "num_samples": plan.num_samples,
        "optimizer": type(optimizer).__name__,
    }


def find_checkpoint(
    plan: Plan, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, group: CpuGroup
) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` names, verified; None for a fresh start.

    Raises:
        UsageError: no checkpoint at that path, a damaged one, or one of a run with another seed,
            batch size, data or optimizer.
    """
    wanted = plan.config.resume_from_checkpoint
    if wanted is None:
        return None
    given = {weight for parameters in optimizer.param_groups for weight in parameters["params"]}
    trained = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor in given]

    def open_checked(path: Path) -> Checkpoint:
        reader = Reader.verified(path, group)
        _check_content(reader.content)
        for name, value in identity.items():
            there = reader.content["identity"].get(name)
            if there != value:
                raise UsageError(f"{path} was made with {name} {there}, this run has {value}")
        _check_tensors(reader, averaged=trained if plan.config.ema_decay else [])
        return Checkpoint(path, reader, trained)

    if wanted == "latest":
        return _newest(plan.config, open_checked, group)
    path = Path(wanted)
    if not path.is_dir():
        raise UsageError(f"--resume_from_checkpoint {wanted}: no checkpoint there; type latest or a path to one")
    try:
        return open_checked(path)
    except DamagedError as error:
        raise UsageError(
            f"--resume_from_checkpoint {wanted} is no whole checkpoint ({error}): type latest for the newest whole one"
        ) from None


def _newest(config: RunConfig, open_checked: Callable[[Path], Checkpoint], group: CpuGroup) -> Checkpoint | None:
    paths = [Path(path) for path in group.broadcast([str(path) for _, path in checkpoints(Path(config.output_dir))])]
    for path in reversed(paths):
        try:
            return open_checked(path)
        except DamagedError as error:
            if group.rank == 0:
                print(f"{path} is no whole checkpoint ({error}): taking the one before it", flush=True)
    if paths:
        raise UsageError(f"no checkpoint in {config.output_dir} is whole: type --overwrite_output_dir to start over")
    if group.rank == 0:
        print(f"no checkpoint in {config.output_dir}: a fresh start", flush=True)
    return None


def _check_content(content: dict[str, Any]) -> None:
    """Raises DamagedError unless a manifest has what `Saver` gave it, of its kind."""
    kinds = get_type_hints(TrainState)
    expected: dict[str, dict[str, Any]] = {
        "identity": {},
        "layout": dict.fromkeys(("processes", "shares", "stages"), int),
        "state": {name: kinds[name] for name in TrainState().numbers()},
        "trainer": {"num_averaged": int, "loss_scale": dict},
    }
    for part, names in expected.items():
        values = content.get(part)
        if not isinstance(values, dict) or (part == "state" and not values.keys() <= names.keys()):
            raise DamagedError(f"{MANIFEST} has another {part} than a checkpoint has")
        for name, kind in names.items():
            kind = kind | int if float in (kind, *get_args(kind)) else kind  # JSON may write 1 for 1.0
            if not isinstance(values.get(name), kind):
                raise DamagedError(f"{MANIFEST} has no {name} in {part}, or one of another kind")
    processes, shares, stages = (content["layout"][name] for name in expected["layout"])
    if content["state"]["step"] < 0 or min(processes, shares, stages) < 1 or processes % (shares * stages):
        raise DamagedError(f"{MANIFEST} has numbers that no run has")


def _check_tensors(reader: Reader, averaged: list[str]) -> None:
    """Raises DamagedError unless what each process had of its own is there, and the averages of these weights."""
    own = [name for name in (*random_state(), "losses", "weights") if name != "random.cuda"]
    ranks = range(reader.content["layout"]["processes"])
    of_processes = (f"process_{rank:05d}.{name}" for rank in ranks for name in own)
    # Of a weight that is not there either, it is of another model.
    averages = (f"average.{name}" for name in averaged if f"model.{name}" in reader.tensors)
    for name in chain(of_processes, averages):
        if name not in reader.tensors:
            raise DamagedError(f"{name} is missing")


class Saver:
    """Writes checkpoints, one at a time; with `--async_save` beside the steps that follow, from a copy."""

    def __init__(self, trainer: Trainer, identity: dict[str, Any], group: CpuGroup):
        self._trainer, self._identity, self._group = trainer, identity, group
        in_background = trainer.plan.config.async_save
        # Two threads must not use one group at a time.
        self._group_of_writer = CpuGroup(trainer.plan.config.hang_timeout) if in_background else group
        self._buffers: dict[str, Tensor] | None = {} if in_background else None
        self._writer = ThreadPoolExecutor(1) if in_background else None
        self._newest: Callable[[], Path | None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(Exception) if error is not None else nullcontext():  # it failed as the run did
            self.finish()
        if self._writer is not None:
            self._writer.shutdown()

    def save(self, state: TrainState) -> None:
        """Writes `checkpoints/step_<steps taken>` and then removes the oldest beyond `--keep_checkpoints`.

        Raises:
            RunError: this one, or the one before it with `--async_save`, could not be written, with
                `--stop_on_save_error`; without that flag one line says so.
        """
        self.finish()
        content = {
            "layout": layout(self._trainer.plan, self._group),
            "identity": self._identity,
            "state": state.numbers(),
            "trainer": self._trainer.numbers(),
        }
        own = random_state() | {
            "losses": torch.stack(state.losses) if state.losses else torch.zeros(0),
            "weights": torch.tensor([float(weight) for weight in state.weights], dtype=torch.float64),
        }
        parts = [Part.whole(f"process_{self._group.rank:05d}.{name}", tensor) for name, tensor in own.items()]
        shard = own_shard(state_parts(self._trainer) + parts, self._group, self._buffers)
        if self._writer is not None:
            self._newest = self._writer.submit(self._write, shard, content).result
        else:
            path = self._write(shard, content)
            self._newest = lambda: path

    def finish(self) -> Path | None:
        """Waits for what is being written. Returns the newest checkpoint; None if it could not be written.
        Raises RunError as `save`."""
        return self._newest()

    def _write(self, shard: Shard, content: dict[str, Any]) -> Path | None:
        config, group = self._trainer.plan.config, self._group_of_writer
        folder, step = Path(config.output_dir) / "checkpoints", content["state"]["step"]
        path = folder / f"step_{step:08d}"
        try:
            _make_folder(folder, group)
            write(path, shard, content, group)
        except WriteError as error:
            line = f"the checkpoint of step {step} could not be written ({error})"
            if config.stop_on_save_error:
                raise RunError(
                    f"{line}: earlier ones are whole; make room, and type --resume_from_checkpoint latest"
                ) from None
            self._trainer.accelerator.print(f"{line}: earlier ones are whole, the run goes on")
            return None
        if group.rank == 0:
            for _, old in checkpoints(Path(config.output_dir))[: -config.keep_checkpoints]:
                try:
                    remove(old)
                except OSError as error:
                    print(f"{old} could not be removed ({error.strerror})", flush=True)
        return path


def export_model(trainer: Trainer, folder: Path) -> None:
    """Writes the weights under the module's own names, in the precision in which they are trained, to
    `<folder>/model.safetensors`; and `config.json` of a transformers model, so that `from_pretrained(folder)` loads it.

    Raises:
        RunError: they cannot be written.
    """
    weights = full_weights(trainer)
    if trainer.accelerator.is_main_process:
        aside = folder.with_name(f"{folder.name}.unfinished")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})  # transformers asks for it
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


def _make_folder(folder: Path, group: CpuGroup) -> None:
    reason = None
    if group.rank == 0:
        try:
            folder.mkdir(exist_ok=True)  # without its parents: an output_dir that has vanished stays away
        except OSError as error:
            reason = str(error)
    if reason := group.broadcast(reason):
        raise WriteError(reason)
