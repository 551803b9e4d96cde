"""The output folder: its lock, the files of an earlier run, and the run card."""

import json
import re
import shutil
import socket
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from ..config import RunConfig
from ..cpu_group import CpuGroup
from ..environment import rank
from ..errors import RunError, UsageError
from ..failure import Failure, first_failure
from ..files import flush, read_file, replacing
from ..plan import Plan
from ..state import TrainState
from .run_card import ending, read_card, replace_card

PREVIOUS = "previous"  # keeps what this run replaces until this run is done
MOVED = re.compile(r"best|model|metrics\.jsonl|step_\d{8,}")  # the names of that
SHARED_FOLDER_S = 10  # longest wait for a network file system to show a new file
EVALUATION = "evaluation.json"  # in `best/`: the step of its weights, and their metrics
TRAINED = "trained"  # in the card of a run that is done, but whose recipe failed after it
_over: list[Path] = []  # the folders of the runs of this process that are done
STARTS_OVER = "starts_over"  # this file marks the folder's content as an earlier run's, which a new run replaces


class OutputDir:
    """The folder of a run. One run owns it at a time; the main process holds the lock.

    How a run treats the files of an earlier run:

    | the folder holds | flags | the run |
    | --- | --- | --- |
    | neither checkpoints nor a model, in use or kept (`best/`) | any | starts; a path to resume from must exist |
    | checkpoints or a model; files that no run wrote | none, or a path to resume from elsewhere | is refused |
    | a model or `best/` that no run wrote | `latest` | is refused |
    | checkpoints or a model | `--overwrite_output_dir` | marks it with `starts_over`, moves each to a `previous/` |
    | checkpoints | `latest` | continues; later ones are damaged: they are renamed |
    | checkpoints | a path in the folder | continues from there; later ones move to `previous/` |
    | `starts_over`, of an interrupted run | `latest` | starts over |
    | `model/` of a run that is done | `latest`, without more steps | has nothing to do |

    What runs moved to `previous/` is removed when the run is done; `starts_over` when its run card is written.

    On entering, raises RunError if the file system cannot read the folder; UsageError if it cannot be written, another
    run owns it, it holds checkpoints or a model and no flag says what to do with them, or not all machines share it. An
    earlier run's files are then unchanged.
    """

    def __init__(self, plan: Plan, group: CpuGroup):
        self.path, self.plan, self.config, self.group = plan.config.output_dir, plan, plan.config, group
        self.card: dict[str, Any] = {}  # the last one from the recorder
        self._was_marked = False  # by an earlier run that was interrupted

    def __enter__(self) -> Self:
        problem: RunError | None = None
        if self.group.rank == 0:
            try:
                self._own()
            except RunError as error:
                problem = error
            except OSError as error:  # also of a listing, on a network disk
                problem = UsageError(f"--output_dir {self.path} cannot be written ({error.strerror}): use another")
        if (problem := self.group.broadcast(problem)) is not None:
            raise problem
        if (environment := self.plan.layout.environment).num_machines > 1:
            _check_shared(self.path, self.group, environment.machine_rank)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if is_silent := isinstance(error, SystemExit) and not error.code:  # its exit code says that all is done
            error = UsageError("the recipe called sys.exit() during the run, before it had a model: remove that call")
        if error is None:
            _over.append(self.path)
        else:
            failure, on_disk = first_failure(error), read_card(self.path)
            is_earlier = isinstance(error, UsageError) and on_disk and not self.card  # and that run is unchanged
            # Another process writes its own failure too: the launcher may end the main process before it can.
            if (self.group.rank == 0 or failure.is_mine) and not is_earlier:
                own = {"command": " ".join(sys.argv), "config": asdict(self.config)}
                replace_card(self.path, own | on_disk | self.card | ending(failure))
        if self.group.rank == 0:
            if not self._was_marked and not self.card:  # nothing has moved
                self._unmark()
            self._lock.release()
        if is_silent and error is not None:
            raise error from None

    def write_card(self, card: dict[str, Any]) -> None:
        """Writes the run card. The folder then belongs to this run; a run that is done replaces what was there."""
        self.card = card
        replace_card(self.path, card)
        self._unmark()
        if card["status"] == "done":
            for folder in (self.path / PREVIOUS, self.path / "checkpoints" / PREVIOUS):
                for moved in [path for path in folder.glob("*") if MOVED.fullmatch(path.name)]:
                    shutil.rmtree(moved, ignore_errors=True)
                    with suppress(OSError):
                        moved.unlink()
                with suppress(OSError):  # it holds something else, too
                    folder.rmdir()

    def _unmark(self) -> None:
        with suppress(OSError):
            (self.path / STARTS_OVER).unlink()
            flush(self.path)

    def is_done(self, state: TrainState) -> bool:
        """Whether a resumed run has nothing left to do; prints a line if so. The same in all processes."""
        if self.config.resume_from_checkpoint is None:
            return False
        if (done := self.group.broadcast(_is_done(self.plan, state))) and self.group.rank == 0:
            if (card := read_card(self.path)).pop(TRAINED, False):  # the part that failed runs again
                replace_card(self.path, card | {"status": "done", "exit_code": 0, "error": None})
            print(f"nothing to do: the run in {self.path} is done; --overwrite_output_dir starts over", flush=True)
        return done

    def set_aside(self, state: TrainState) -> None:
        """Moves files of an earlier run to `previous/` beside each. Raises OSError; then nothing has moved."""
        starts_anew = state.step == 0 or resumes_from_elsewhere(self.config)
        names = ("best", "model", "metrics.jsonl") if state.step == 0 else ("best",) if starts_anew else ()
        leftovers = [self.path / name for name in names if (self.path / name).exists()]
        for step, checkpoint in checkpoints(self.path):
            if starts_anew or (step > state.step and self.config.resume_from_checkpoint != "latest"):
                leftovers.append(checkpoint)
            elif step > state.step:  # damaged or unreadable
                with suppress(OSError):
                    checkpoint.rename(checkpoint.with_name(f"damaged_{checkpoint.name}"))
        if leftovers and not self._was_marked:  # else an interrupted run has moved some already
            replaced = {"checkpoints": f"checkpoints/{PREVIOUS}", "model": PREVIOUS, "best": f"{PREVIOUS}/best"}
            for newer, older in replaced.items():
                if (self.path / newer).exists():  # if the last run exported no model, the older model stays
                    shutil.rmtree(self.path / older, ignore_errors=True)
        _move_beside([(leftover, leftover.parent / PREVIOUS) for leftover in leftovers])
        others = Path(self.config.resume_from_checkpoint or "").resolve().parent.parent / "best"
        if starts_anew and state.best is not None and others.is_dir() and state.best_step == _step_of(others):
            with suppress(OSError), replacing(self.path / "best") as aside:
                shutil.copytree(others, aside, dirs_exist_ok=True)

    def check_best(self, state: TrainState) -> None:
        """Forgets the best evaluation unless `best/` has its weights: other steps of this run, which are cut now, may
        have replaced them. A collective."""
        if not self.group.broadcast(state.best is None or state.best_step == _step_of(self.path / "best")):
            if self.group.rank == 0:
                print(f"best/ has no weights of step {state.best_step}: the next evaluation counts as the best so far")
            state.forget_best()

    def _own(self) -> None:
        """Locks the folder. Raises UsageError if that is impossible, or like `_check_earlier`."""
        resumed = self.config.resume_from_checkpoint
        if resumed not in (None, "latest") and not Path(resumed).is_dir():
            raise UsageError(f"--resume_from_checkpoint {resumed}: no checkpoint there; use latest or the path of one")
        try:
            if not self.path.is_dir():
                self.path.mkdir(parents=True, exist_ok=True)
                flush(self.path.parent)
            self._lock = FileLock(self.path / ".lock")
            self._lock.acquire(timeout=0)
        except FileExistsError:  # a file, or a link that leads nowhere
            raise UsageError(f"--output_dir {self.path} is not a folder: use another") from None
        except Timeout:
            raise UsageError(f"another run writes to {self.path}: wait for it, or use another --output_dir") from None
        self._check_earlier()
        for left in self.path.glob("run.json.[0-9]*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        shutil.rmtree(self.path / "checkpoints" / "removed", ignore_errors=True)
        self._was_marked = starts_over(self.path)
        if self.config.overwrite_output_dir and not self._was_marked:
            (self.path / STARTS_OVER).touch()
            flush(self.path)

    def _check_earlier(self) -> None:
        """Raises UsageError if the user must decide what to do with what is in the folder."""
        resumed, whose, goes_on = self.config.resume_from_checkpoint, "an earlier run", ""
        is_foreign = "command" not in read_card(self.path) and not starts_over(self.path)  # no run wrote what is there
        is_latest, has_checkpoints = resumed == "latest", bool(checkpoints(self.path))
        is_new = is_latest and is_foreign and not has_checkpoints
        continues = resumed is not None and not resumes_from_elsewhere(self.config) and not is_new
        if self.config.overwrite_output_dir or continues:
            return
        how, otherwise = "continue", "start over"
        if resumed is not None and not is_latest:
            whose, how, otherwise = f"a different run than {resumed}", "continue from there", "replace it"
        held = "checkpoints" if has_checkpoints else "the model" if (self.path / "model").exists() else None
        if held is not None and (has_checkpoints or not is_foreign):
            goes_on = f"--resume_from_checkpoint latest to {how}, "
        elif held is None:
            names = ["best"]
            if not is_latest:  # resuming finishes what a killed run was replacing
                names += [f"{PREVIOUS}/model", f"{PREVIOUS}/best", *["metrics.jsonl", "run.json"] * is_foreign]
            held = next((name for name in names if (self.path / name).exists()), None)
        if held is not None:
            advice = f"use {goes_on}--overwrite_output_dir to {otherwise}, or another --output_dir"
            raise UsageError(f"{self.path} holds {held} of {whose}: {advice}")


def _move_beside(moves: list[tuple[Path, Path]]) -> None:
    """Moves each path into a folder of its own parent, so that it stays in its file system: `checkpoints/` may be a
    link to another one. Either all move, and are then on the disk, or none. Raises OSError."""
    moved: list[tuple[Path, Path]] = []
    try:
        for path, folder in moves:
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)
            moved.append((path, folder / path.name))
        folders = dict.fromkeys(folder for _, folder in moves)
        for folder in (*folders, *(each.parent for each in folders)):  # a name that one loses is in the other
            flush(folder)
    except OSError:
        for path, place in reversed(moved):
            with suppress(OSError):
                place.rename(path)
        raise


def _step_of(best: Path) -> int | None:
    """The step of the weights in a `best/`; None if there are none, or an earlier version wrote them."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(read_file(best / EVALUATION))["step"]
    return None


def _check_shared(folder: Path, group: CpuGroup, machine_rank: int) -> None:
    """Raises UsageError in all processes unless all machines share the folder."""
    token = folder / group.broadcast(f".seen_by_all_{uuid.uuid4().hex}")
    if group.rank == 0:
        token.touch()
    group.broadcast(None)  # all wait here until the file exists
    deadline = time.monotonic() + SHARED_FOLDER_S
    while not token.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = group.all_gather((socket.gethostname(), machine_rank, token.exists()))
    if group.rank == 0:
        token.unlink(missing_ok=True)
    for host, machine in [(host, machine) for host, machine, sees in hosts if not sees]:
        its = f"the --output_dir {folder} of machine 0 ({hosts[0][0]})"
        raise UsageError(
            f"machine {machine} ({host}) does not see {its}: use one on a file system that all machines share"
        )


def resumes_from_elsewhere(config: RunConfig) -> bool:
    """Whether `--resume_from_checkpoint` is a path outside the output_dir."""
    resumed, own = config.resume_from_checkpoint, config.output_dir / "checkpoints"
    return resumed not in (None, "latest") and Path(resumed).resolve().parent != own.resolve()


def _is_done(plan: Plan, state: TrainState) -> bool:
    """Whether the run is done: by its run card, and by `state` or the last step in the card."""
    card, config = read_card(plan.config.output_dir), plan.config
    left = all((config.output_dir / name).exists() for name in ("model", "metrics.jsonl"))
    if not (card.get("status") == "done" or card.get(TRAINED)) or not left or starts_over(config.output_dir):
        return False
    with suppress(KeyError, TypeError, AttributeError):  # not a card of this project
        same = all(card["config"].get(name) == getattr(config, name) for name in ("seed", "batch_size", "data"))
        at_end = card["num_steps"] == card["last_metrics"].get("step") == plan.num_steps
        return plan.is_over(state) or (config.resume_from_checkpoint == "latest" and same and at_end)
    return False


def fail_after_run(failure: Failure) -> None:
    """Writes into the card of a finished run how the recipe failed afterwards: it still counts as done for a resume."""
    for path in _over:
        if (card := read_card(path)).get("status") == "done" and (failure.is_mine or rank() == 0):
            replace_card(path, card | ending(failure) | {TRAINED: True})


def starts_over(output_dir: Path) -> bool:
    """Whether a new run replaces the content of the folder, and was interrupted before it had begun."""
    return (output_dir / STARTS_OVER).exists()


def checkpoint_name(step: int) -> str:
    """The name of the folder with the checkpoint after this many steps."""
    return f"step_{step:08d}"


def checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each complete checkpoint, the oldest first. Raises RunError if the folder is unreadable."""
    folder = output_dir / "checkpoints"
    try:
        names = [path.name for path in folder.iterdir()]  # not glob, which hides errors
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{folder} cannot be read ({error.strerror}): nothing was changed") from None
    named = [name for name in names if re.fullmatch(r"step_\d{8,}", name)]
    return sorted((int(name.removeprefix("step_")), folder / name) for name in named)
