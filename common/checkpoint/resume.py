"""Finds, verifies and loads the checkpoint to resume from."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..cpu_group import CpuGroup
from ..errors import UsageError
from ..parallel.engine import Engine, load_optimizer
from ..parallel.on_disk import leave_on_disk
from ..parallel.optimizer_state import Numbers
from ..parallel.parts import kept_tensors
from ..plan import Plan
from ..records.output_dir import checkpoint_name, checkpoints, starts_over
from ..records.unrecorded import Unrecorded
from ..state import TrainState
from .format import MANIFEST, DamagedError, check_same_model
from .identity import curve, described, differences, num_replicas, own_flags, shared_by
from .reader import Reader

Opened = TypeVar("Opened")


@dataclass
class Checkpoint:
    """A checkpoint found on disk and verified.

    Attributes:
        path: its folder.
        reader: reads its files.
        trained: names of the weights that the optimizer of this run was given.
    """

    path: Path
    reader: Reader
    trained: list[str]

    @property
    def state(self) -> TrainState:
        """The saved state of the run."""
        content = self.reader.content["state"]
        return TrainState(**{name: content[name] for name in TrainState().state_dict()})

    def load_weights(self, model: nn.Module) -> None:
        """Loads the weights into the bare module, before `prepare`; weights that are on disk are now those of the
        checkpoint. Raises UsageError if the model differs."""
        shapes = {
            name.removeprefix("model."): tensor["shape"]
            for name, tensor in self.reader.tensors.items()
            if name.startswith("model.")
        }
        check_same_model(self.path, shapes, model)
        here = kept_tensors(model)
        for name in shapes:
            if here[name].is_meta:
                leave_on_disk(here[name], self.reader, f"model.{name}")
        in_memory = [name for name in shapes if not here[name].is_meta]
        weights = {name: self.reader.tensor(f"model.{name}", maps=True) for name in in_memory}
        model.load_state_dict(weights, strict=False)  # a checkpoint of adapters holds them alone

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Loads the state of the optimizer of a bare module."""
        load_optimizer(optimizer, kept_tensors(model), self.reader)
        Numbers(optimizer).load_state_dict(self.reader.content["trainer"]["optimizer"])

    def load_rest(self, engine: Engine, unrecorded: Unrecorded, group: CpuGroup) -> None:
        """Loads everything except the weights, after `prepare`: optimizer state, moving averages, loss scale, and
        each process's sums since the last record."""
        content = self.reader.content
        unrecorded.load_state_dict(content["state"])
        engine.load_parts(self.reader)
        engine.load_state_dict(content["trainer"])
        accelerator, here = engine.accelerator, shared_by(engine.plan.layout)
        there = content["layout"]
        accelerator.print(f"resumed from {self.path}")
        if self.state.step > engine.plan.num_steps:
            accelerator.print(f"it has {self.state.step} steps, this run {engine.plan.num_steps}: it trains no more")
        if content["schedule"] != curve(engine.plan):
            accelerator.print("the learning rate follows another curve than in the checkpoint")
        for name, value in own_flags(engine.plan).items():
            if (before := content["own_flags"].get(name, value)) != value:
                accelerator.print(f"the checkpoint's run had --{name} {before}, this run has {value}")
        have_state = {name.rpartition(".")[0] for name in self.reader.tensors if name.startswith("optimizer.")}
        anew = [name for name in self.trained if f"optimizer.{name}" not in have_state]
        if have_state and anew:  # normal for a weight that no forward pass has used
            accelerator.print(f"it has no optimizer state for {', '.join(anew)}: that state starts anew")
        if there == here:
            self._load_process(group.rank, unrecorded, accelerator.device)
        else:
            if group.rank == 0:  # rank 0 takes all sums, scaled so that old and new samples count equally
                factor = num_replicas(here) / num_replicas(there)
                for rank in range(there["processes"]):
                    self._load_process(rank, unrecorded, accelerator.device, factor)
            accelerator.print(f"it was saved by {described(there)} and goes on in {described(here)}")
        self.reader.close()

    def _load_process(self, rank: int, unrecorded: Unrecorded, device: torch.device, factor: float = 1.0) -> None:
        unrecorded.losses += list(self._of_process(rank, "losses").to(device) * factor)
        unrecorded.weights += (self._of_process(rank, "weights") * factor).tolist()
        prefix = f"process_{rank:05d}.metrics."
        names = [key.removeprefix(prefix) for key in self.reader.tensors if key.startswith(prefix)]
        sums = {name: self._of_process(rank, f"metrics.{name}").to(device) * factor for name in names}
        unrecorded.metrics += [sums] if sums else []

    def _of_process(self, rank: int, name: str) -> Tensor:
        return self.reader.tensor(f"process_{rank:05d}.{name}")


class FreshStart:
    """Takes the place of a checkpoint if a run starts at step 0."""

    path = None

    @property
    def state(self) -> TrainState:
        """The state before the first step."""
        return TrainState()

    def load_weights(self, model: nn.Module) -> None:
        """Keeps the model's weights."""

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keeps the optimizer as it is."""

    def load_rest(self, engine: Engine, unrecorded: Unrecorded, group: CpuGroup) -> None:
        """Keeps everything as it is."""


def find_checkpoint(
    plan: Plan, identity: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, group: CpuGroup
) -> Checkpoint | FreshStart:
    """Finds and verifies the checkpoint that `--resume_from_checkpoint` names; without the flag, a fresh start.

    Raises:
        UsageError: no checkpoint at that path, a damaged one, or one of a run with another seed,
            batch size, data, optimizer or EMA decay.
    """
    wanted = plan.config.resume_from_checkpoint
    if wanted is None:
        return FreshStart()
    given = {weight for parameters in optimizer.param_groups for weight in parameters["params"]}
    trained = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor in given]

    def open_checked(path: Path) -> Checkpoint:
        reader = Reader.verified(path, group)
        at = checkpoint_name(reader.content["state"]["step"])
        if re.fullmatch(r"step_\d{8,}", path.name) and path.name != at:
            raise DamagedError(f"{MANIFEST} is that of {at}")
        for name, there, here in differences(identity, reader.content["identity"]):
            raise UsageError(f"{path} was made with {name} {there}, this run has {here}")
        _check_tensors(reader, averaged=trained if plan.config.ema_decay else [])
        return Checkpoint(path, reader, trained)

    if wanted == "latest" and group.broadcast(starts_over(plan.config.output_dir)):
        if group.rank == 0:
            print(f"an interrupted run was to replace what is in {plan.config.output_dir}: a fresh start", flush=True)
        return FreshStart()
    if wanted == "latest":
        found = newest(plan.config.output_dir, open_checked, group)
        if found is None and group.rank == 0:
            print(f"no checkpoint in {plan.config.output_dir}: a fresh start", flush=True)
        return found or FreshStart()
    try:
        return open_checked(Path(wanted))
    except DamagedError as error:
        raise UsageError(
            f"--resume_from_checkpoint {wanted} is not a complete checkpoint ({error}): type latest for the newest "
            "complete one"
        ) from None


def newest(output_dir: Path, open_checked: Callable[[Path], Opened], group: CpuGroup) -> Opened | None:
    """The newest complete checkpoint of a run, as `open_checked` opens it; None if there is no checkpoint.

    Raises:
        UsageError: none is complete.
    """
    paths = [Path(path) for path in group.broadcast([str(path) for _, path in checkpoints(output_dir)])]
    for path in reversed(paths):
        try:
            return open_checked(path)
        except DamagedError as error:
            if group.rank == 0:
                print(f"{path} is not a complete checkpoint ({error}): taking the one before it", flush=True)
    if paths:
        raise UsageError(f"no checkpoint in {output_dir} is complete: type --overwrite_output_dir to start over")
    return None


def _check_tensors(reader: Reader, averaged: list[str]) -> None:
    """Raises DamagedError if a tensor of a process, an average of these weights, or all slots are missing, or if the
    layout is impossible."""
    if reader.content["has_state"] and not any(name.startswith("optimizer.") for name in reader.tensors):
        raise DamagedError("the state of the optimizer is missing")
    processes, shares, stages = (reader.content["layout"][name] for name in ("processes", "shares", "stages"))
    if min(processes, shares, stages) < 1 or processes % (shares * stages):
        raise DamagedError(f"{MANIFEST} has an impossible layout")
    of_processes = (f"process_{rank:05d}.{name}" for rank in range(processes) for name in ("losses", "weights"))
    # If the weight is missing too, the checkpoint is of another model: load_weights reports that.
    averages = (f"average.{name}" for name in averaged if f"model.{name}" in reader.tensors)
    for name in chain(of_processes, averages):
        if name not in reader.tensors:
            raise DamagedError(f"{name} is missing")
