"""The output folder: who owns it, and which checkpoints lie in it."""

import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from common.config import RunConfig
from common.cpu_group import CpuGroup
from common.environment import num_machines
from common.errors import Failure, UsageError, first_failure
from common.launch.machines import check_shared_folder
from common.plan import Plan
from common.records.run_card import ending, read_card, replace_card
from common.state import TrainState


class OutputDir:
    """The folder of a run, owned by one run at a time; the main process holds the lock.

    Raises (on entering): UsageError if it cannot be written, another run owns it, it holds
    checkpoints or a model and nobody said what to do with them, or not all machines see it. Nothing
    in it has changed then.
    """

    def __init__(self, plan: Plan, group: CpuGroup):
        self.path, self.config, self.group = Path(plan.config.output_dir), plan.config, group

    def __enter__(self) -> Self:
        problem = self.group.broadcast((self._nothing_to_resume() or self._own()) if self.group.rank == 0 else None)
        if problem is not None:
            raise UsageError(problem)
        if num_machines() > 1:
            check_shared_folder(self.path, self.group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(first_failure(error), is_refused=isinstance(error, UsageError))
        if self.group.rank == 0:
            self._lock.release()

    def _tell(self, failure: Failure, is_refused: bool) -> None:
        """Leaves a card of a run that failed before it had one."""
        card = read_card(self.path)
        if is_refused and card:  # it reports this refusal already, or belongs to an earlier run that is as it was
            return
        if self.group.rank == 0 or failure.is_mine:
            own = {"command": " ".join(sys.argv), "config": asdict(self.config)}
            replace_card(self.path, own | card | ending(failure))

    def _nothing_to_resume(self) -> str | None:
        resumed = self.config.resume_from_checkpoint
        if resumed in (None, "latest") or Path(resumed).is_dir():
            return None
        return f"--resume_from_checkpoint {resumed}: no checkpoint there; type latest or a path to one"

    def _own(self) -> str | None:
        """What is wrong with it, if anything."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            return f"another run writes to {self.path}: wait for it, or type --output_dir"
        except OSError as error:
            return f"--output_dir {self.path} cannot be written ({error.strerror}): type another"
        return self._question()

    def _question(self) -> str | None:
        """What the user must decide about an earlier run in it, if anything."""
        resumed = self.config.resume_from_checkpoint
        held = "checkpoints" if checkpoints(self.path) else "the model" if (self.path / "model").exists() else None
        if held is None or self.config.overwrite_output_dir:
            return None
        if resumes_from_elsewhere(self.config):
            return (
                f"{self.path} holds {held} of another run than {resumed}: type --resume_from_checkpoint latest to "
                "go on from there, --overwrite_output_dir to replace it, or another --output_dir"
            )
        if resumed is None:
            return (
                f"{self.path} holds {held} of an earlier run: type --resume_from_checkpoint latest to go on, "
                "--overwrite_output_dir to start over, or another --output_dir"
            )
        return None


def resumes_from_elsewhere(config: RunConfig) -> bool:
    """Whether `--resume_from_checkpoint` is a path out of the output_dir."""
    resumed, own = config.resume_from_checkpoint, Path(config.output_dir) / "checkpoints"
    return resumed not in (None, "latest") and Path(resumed).resolve().parent != own.resolve()


def is_done(plan: Plan, state: TrainState) -> bool:
    """Whether the run in the output_dir has come to its end, so that from `state` on there is nothing to do."""
    card, config = read_card(Path(plan.config.output_dir)), plan.config
    if card.get("status") != "done":
        return False
    try:
        same = all(card["config"].get(name) == getattr(config, name) for name in ("seed", "batch_size", "data"))
        at_end = card["num_steps"] == card["last_metrics"].get("step") == plan.num_steps
    except (KeyError, TypeError, AttributeError):  # somebody else wrote it
        return False
    return plan.is_over(state) or (config.resume_from_checkpoint == "latest" and same and at_end)


def checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each checkpoint that has been published, the oldest first."""
    found = (output_dir / "checkpoints").glob("step_*")
    named = (path for path in found if re.fullmatch(r"step_\d{8,}", path.name))
    return sorted((int(path.name.removeprefix("step_")), path) for path in named)
