"""The folder of a run: who owns it, the checkpoints in it, and the run card run.json, which tells how the run ended."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from common.config import RunConfig
from common.errors import Failure, StoppedError, UsageError, first_failure
from common.group import CpuGroup
from common.launch import num_machines
from common.machines import check_shared_folder
from common.plan import Plan
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
        problem = self.group.broadcast(self._own() if self.group.rank == 0 else None)
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
        if is_refused and card:  # it is this run's, which says so, or an earlier one's, of which nothing was touched
            return
        if self.group.rank == 0 or failure.is_mine:
            own = {"command": " ".join(sys.argv), "config": asdict(self.config)}
            replace_card(self.path, own | card | ending(failure))

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
        held = "checkpoints" if checkpoints(self.path) else "the model" if (self.path / "model").exists() else None
        resumed = self.config.resume_from_checkpoint
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


def read_card(output_dir: Path) -> dict[str, Any]:
    """The run card; empty where there is none, or what is none."""
    try:
        card = json.loads((output_dir / "run.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return card if isinstance(card, dict) else {}


def write_failure(output_dir: Path, failure: Failure) -> None:
    """Notes in the run card how the run ended, from any process or thread."""
    replace_card(output_dir, read_card(output_dir) | ending(failure))


def ending(failure: Failure) -> dict[str, Any]:
    """What the run card says of a run that failed or was stopped."""
    status = "stopped" if failure.exit_code == StoppedError.exit_code else "failed"
    return {"status": status, "exit_code": failure.exit_code, "error": failure.line}


def replace_card(output_dir: Path, card: dict[str, Any]) -> None:
    """Writes the run card."""
    part = output_dir / f"run.json.{os.getpid()}"
    try:
        part.write_text(json.dumps(card, indent=2, default=str) + "\n")
        part.rename(output_dir / "run.json")  # a reader never meets half a card
    except OSError as error:
        print(f"{output_dir}/run.json could not be written ({error.strerror})", file=sys.stderr, flush=True)
