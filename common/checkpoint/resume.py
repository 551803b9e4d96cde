"""Finds the checkpoint to go on from, verifies it and loads it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from common.checkpoint.format import MANIFEST, DamagedError
from common.checkpoint.identity import described, layout, num_replicas
from common.checkpoint.reader import Reader
from common.config import RunConfig
from common.cpu_group import CpuGroup
from common.errors import UsageError
from common.parallel.trainer import Trainer
from common.plan import Plan
from common.random_state import random_state, set_random_state
from common.records.output_dir import checkpoints
from common.state import TrainState


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
        trainer.load_parts(self.reader)
        trainer.load_state_dict(content["trainer"])
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
            if group.rank == 0:  # any process may hold the sums, but each must count the right number of times
                factor = num_replicas(here) / num_replicas(there)
                for rank in range(there["processes"]):
                    self._load_process(rank, state, accelerator.device, factor)
            seed = trainer.plan.config.seed + state.step * 1009 + trainer.plan.data_parallel_rank
            set_seed(seed % 2**32)
            accelerator.print(
                f"it was saved by {described(there)} and goes on in {described(here)}: samples and schedule go on, "
                "random states (dropout) are seeded anew, with seed + 1009 × step + data-parallel rank"
            )
        self.reader.close()

    def _load_process(self, rank: int, state: TrainState, device: torch.device, factor: float = 1.0) -> None:
        state.losses += list(self._of_process(rank, "losses").to(device) * factor)
        state.weights += (self._of_process(rank, "weights") * factor).tolist()

    def _of_process(self, rank: int, name: str) -> Tensor:
        return self.reader.tensor(f"process_{rank:05d}.{name}")


class FreshStart:
    """Stands in for a checkpoint when a run starts from nothing."""

    path = None

    @property
    def state(self) -> TrainState:
        """The state before the first step."""
        return TrainState()

    def load_weights(self, model: nn.Module) -> None:
        """Leaves the model's own weights."""

    def load_rest(self, trainer: Trainer, state: TrainState, group: CpuGroup) -> None:
        """Seeds each data-parallel rank differently, so that dropout differs between samples."""
        set_seed(trainer.plan.config.seed + trainer.plan.data_parallel_rank)


def find_checkpoint(
    plan: Plan, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, group: CpuGroup
) -> Checkpoint | FreshStart:
    """The checkpoint that `--resume_from_checkpoint` names, verified, or a fresh start.

    Raises:
        UsageError: no checkpoint at that path, a damaged one, or one of a run with another seed,
            batch size, data or optimizer.
    """
    wanted = plan.config.resume_from_checkpoint
    if wanted is None:
        return FreshStart()
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
    try:
        return open_checked(Path(wanted))
    except DamagedError as error:
        raise UsageError(
            f"--resume_from_checkpoint {wanted} is no whole checkpoint ({error}): type latest for the newest whole one"
        ) from None


def _newest(config: RunConfig, open_checked: Callable[[Path], Checkpoint], group: CpuGroup) -> Checkpoint | FreshStart:
    paths = [Path(path) for path in group.broadcast([str(path) for _, path in checkpoints(config.output_dir)])]
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
    return FreshStart()


def _check_content(content: dict[str, Any]) -> None:
    """Raises DamagedError unless a manifest has what `Saver` gave it, of its kind."""
    kinds = get_type_hints(TrainState)
    expected: dict[str, dict[str, Any]] = {
        "identity": {},
        "layout": dict.fromkeys(("processes", "shares", "stages"), int),
        "state": {name: kinds[name] for name in TrainState().state_dict()},
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
    # Where the weight is missing, too, the checkpoint is of another model: load_weights says so.
    averages = (f"average.{name}" for name in averaged if f"model.{name}" in reader.tensors)
    for name in chain(of_processes, averages):
        if name not in reader.tensors:
            raise DamagedError(f"{name} is missing")
