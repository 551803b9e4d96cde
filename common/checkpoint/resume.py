"""Finds, verifies and loads the checkpoint to resume from."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..cpu_group import CpuGroup
from ..environment import print_once
from ..errors import RunError, UsageError
from ..package import version
from ..plan import Plan
from ..records.output_dir import checkpoint_name, checkpoints, starts_over
from ..records.running_sums import RunningSums
from ..state import TrainState
from ..step.engine import Engine
from ..step.setup import Setup
from ..weights.on_disk import leave_on_disk
from ..weights.shards import checkpoint_tensors, load_tensors
from .format import MANIFEST, DamagedError, check_same_model
from .identity import curve, describe, differences, other_flags, other_sample
from .reader import Reader

Opened = TypeVar("Opened")


@dataclass
class Checkpoint:
    """A checkpoint found on disk and verified. Without a reader it is the start at step 0, and loads nothing."""

    path: Path = Path()  # its folder
    reader: Reader | None = None  # reads its files
    trained: Sequence[str] = ()  # names of the weights in the optimizer of this run
    other_evaluation: bool = False  # whether the run evaluated other samples

    @property
    def state(self) -> TrainState:
        state = TrainState() if self.reader is None else TrainState(**self.reader.content["state"])
        if self.other_evaluation:
            state.forget_best()
        return state

    def load_weights(self, model: nn.Module) -> None:
        """Loads the weights into the bare module, before `prepare`; or leaves them on disk. Raises UsageError."""
        if (reader := self.reader) is None:
            return
        saved = {name[6:]: tensor for name, tensor in reader.tensors.items() if name.startswith("model.")}
        found = {name: (tensor["shape"], getattr(torch, tensor["dtype"])) for name, tensor in saved.items()}
        check_same_model(self.path, found, model)
        here = checkpoint_tensors(model)
        for name in found:
            if here[name].is_meta:
                leave_on_disk(here[name], reader, f"model.{name}")
        weights = {name: reader.tensor(f"model.{name}", maps=True) for name in found if not here[name].is_meta}
        load_tensors(model, weights)

    def load_state(self, engine: Engine) -> None:
        """Loads, after `prepare`, optimizer state, averages and loss scale."""
        if self.reader is not None:
            engine.load_parts(self.reader)
            engine.load_state_dict(self.reader.content["trainer"])

    def load_rest(self, engine: Engine, unrecorded: RunningSums) -> None:
        """The same, and the sums since the last record. Says what differs from the run that wrote the checkpoint."""
        if (reader := self.reader) is None:
            return
        content = reader.content
        unrecorded.load_state_dict(content["unrecorded"])
        self.load_state(engine)
        engine.replicas.agreed = self.state.step
        accelerator, plan, here = engine.accelerator, engine.plan, describe(engine.plan.layout)
        accelerator.print(f"resumed from {self.path}")
        before, now = content.get("versions", {}).get("accelerate-recipes"), version()
        if before not in (None, now):  # None: a checkpoint from before versions were stored
            accelerator.print(f"the checkpoint was written by accelerate-recipes {before}, this is {now}")
        if self.state.step > plan.num_steps:
            both = f"the checkpoint is at step {self.state.step}, and this run has {plan.num_steps} steps"
            accelerator.print(f"{both}: nothing is left to train")
        elif plan.is_over(self.state) and self.state.step < plan.num_steps:
            flag = f"--early_stopping_patience {plan.config.early_stopping_patience}"
            number = self.state.num_not_better
            accelerator.print(f"{flag} ends this run at once: {number} evaluations in a row were not better")
        if content["schedule"] != curve(plan):
            accelerator.print("the learning rate follows a different schedule than in the checkpoint")
        for name, before, value in other_flags(plan, content):
            accelerator.print(f"the checkpoint's run had --{name} {before}, this run has {value}")
        if self.other_evaluation:
            accelerator.print("the evaluation data differ from the checkpoint's: do not compare their metrics")
        have_state = {name.rpartition(".")[0] for name in reader.tensors if name.startswith("optimizer.")}
        anew = [name for name in self.trained if f"optimizer.{name}" not in have_state]
        if have_state and anew:  # normal for a weight that no forward pass has used
            accelerator.print(f"it has no optimizer state for {', '.join(anew)}: that state starts from scratch")
        if content["layout"] != here:
            accelerator.print(f"it was saved by {content['layout']} and continues on {here}")
        reader.close()


def find_checkpoint(setup: Setup, identity: dict[str, Any], group: CpuGroup) -> Checkpoint:
    """Finds and verifies the checkpoint that `--resume_from_checkpoint` names; without the flag, the start at step 0.
    Raises UsageError if there is none, it is damaged, or its run had another seed, batch size, data or optimizer."""
    plan, wanted = setup.plan, setup.plan.config.resume_from_checkpoint
    if wanted is None:
        return Checkpoint()
    given = {weight for parameters in setup.optimizer.param_groups for weight in parameters["params"]}
    trained = [name for name, tensor in setup.model.state_dict(keep_vars=True).items() if tensor in given]

    def open_checked(path: Path, group: CpuGroup) -> Checkpoint:
        reader = Reader.open_verified(path, group)
        at = checkpoint_name(reader.content["state"]["step"])
        if re.fullmatch(r"step_\d{8,}", path.name) and path.name != at:
            raise DamagedError(f"{MANIFEST} belongs to {at}")
        _check_same_run(path, reader.content, plan, identity)
        ours, theirs = (each.get("eval_samples", {}) for each in (identity, reader.content["identity"]))
        other_evaluation = any(other_sample(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
        return Checkpoint(path, reader, trained, other_evaluation)

    if wanted == "latest" and group.broadcast(starts_over(plan.config.output_dir)):
        print_once(f"an earlier run stopped while it replaced {plan.config.output_dir}: starting from scratch")
        return Checkpoint()
    if wanted == "latest":
        try:
            found = newest(plan.config.output_dir, open_checked, group)
        except DamagedError:
            raise UsageError(
                f"no checkpoint in {plan.config.output_dir} is complete: use --overwrite_output_dir to start over"
            ) from None
        if found is None:
            print_once(f"no checkpoint in {plan.config.output_dir}: starting from scratch")
        return found or Checkpoint()
    try:
        return open_checked(Path(wanted), group)
    except DamagedError as error:
        near = checkpoints(Path(wanted))  # if it is the folder of a run
        advice = f"use {near[-1][1]}" if near else "use latest for the newest complete one"
        raise UsageError(
            f"--resume_from_checkpoint {wanted} is not a complete checkpoint ({error}): {advice}"
        ) from None


def _check_same_run(path: Path, content: dict[str, Any], plan: Plan, identity: dict[str, Any]) -> None:
    """Raises UsageError for a checkpoint of a run with different settings or different data."""
    for name, there, here in differences(identity, content["identity"]):
        raise UsageError(f"{path} was made with {name} {there}, this run has {here}")
    if (found := other_sample(identity["samples"], content["identity"].get("samples", {}))) is not None:
        flags = [f"; --{name} was {there}, is {here}" for name, there, here in other_flags(plan, content)]
        raise UsageError(
            f'the data differ from the data of the checkpoint {path}: "{found[1]}" of sample {found[0]} differs'
            f"{''.join(flags)}: resume with the data and flags of that run, or use --overwrite_output_dir to start over"
        )


def newest(output_dir: Path, opener: Callable[[Path, CpuGroup], Opened], group: CpuGroup) -> Opened | None:
    """The newest complete checkpoint of a run, as `opener` opens it; None if there is no checkpoint. Raises
    DamagedError if none is complete, RunError if the file system cannot read one that may be complete."""
    unread: RunError | None = None
    paths = [Path(path) for path in group.broadcast([str(path) for _, path in checkpoints(output_dir)])]
    for path in reversed(paths):
        try:
            return opener(path, group)
        except UsageError:
            raise
        except (DamagedError, RunError) as error:
            unread = unread or (error if isinstance(error, RunError) else None)
            print_once(f"{path} is not a complete checkpoint ({error}): using the checkpoint before it")
    if unread is not None:
        raise unread
    if paths:
        raise DamagedError(f"no checkpoint in {output_dir} is complete")
    return None
