"""Writes checkpoints."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..cpu_group import CpuGroup
from ..environment import versions
from ..errors import RunError, UsageError, first_line
from ..files import flush
from ..records.output_dir import checkpoint_name, checkpoints
from ..records.running_sums import RunningSums
from ..state import TrainState
from ..step.engine import Engine
from ..stopping.watch import Watch
from .exported import export_dtype, export_model, write_model
from .format import MODEL_FILES, DamagedError, WriteError
from .identity import curve, describe, differences, own_flags
from .reader import Reader
from .source import source
from .writer import OwnShards, collect_shards, remove, write

AfterSave = Callable[[int, Callable[[], Path | None]], object]


class Saver:
    """Writes checkpoints, one at a time; with `--async_save` during the next steps, from a copy. Before the first step
    the main process also writes the small files of an export. After each save, it calls `after_save` with the number of
    steps taken and `finish`."""

    def __init__(self, engine: Engine, identity: dict[str, Any], group: CpuGroup, watch: Watch, after_save: AfterSave):
        self._engine, self._identity, self._group, self._watch = engine, identity, group, watch
        self._after_save = after_save
        in_background = engine.plan.config.async_save
        # Two threads must not use the same group at once.
        self._group_of_writer = CpuGroup(engine.plan.config.hang_timeout) if in_background else group
        self._buffers: dict[str, Tensor] | None = {} if in_background else None
        self._writer = ThreadPoolExecutor(1) if in_background else None
        self._remover, self._removals = ThreadPoolExecutor(1), list[Future[None]]()
        self._known: dict[Path, bool] = {}  # {checkpoint: whether it is one of this run}
        self._newest: Callable[[], Path | None] = lambda: None
        self._kinds: dict[str, tuple[torch.Size, bool]] | None = None  # of the buffers
        self._check_buffers()

    def __enter__(self) -> Self:
        if self._group.rank != 0:
            return self
        config, export = self._engine.plan.config, self._engine.setup.options.get("export")
        folder = config.output_dir / "checkpoints"
        try:
            folder.mkdir(exist_ok=True)
            flush(folder.parent)  # once in a run: a run that was killed may have made it
            write_model(self._engine.module, folder / MODEL_FILES, config.export_dtype, export, with_weights=False)
        except Exception as error:  # any: `export` is the recipe's. The checkpoint is complete without these files.
            print(f"accelerate-recipes export will write only weights, no other files: {first_line(error)}", flush=True)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with suppress(Exception) if error is not None else nullcontext():  # the run's own error is the one to report
            self.finish()
        for thread in filter(None, (self._writer, self._remover)):
            thread.shutdown()
        output_dir = self._engine.plan.config.output_dir
        with suppress(OSError, RunError):  # there is more in it, or it cannot be read
            if self._group.rank == 0 and not checkpoints(output_dir):
                shutil.rmtree(output_dir / "checkpoints" / MODEL_FILES, ignore_errors=True)
                (output_dir / "checkpoints").rmdir()

    def export(self, state: TrainState, unrecorded: RunningSums) -> str | None:
        """Exports the weights, or their averages; returns their digest. On failure: a checkpoint, then RunError."""
        try:
            with self._engine.ema_weights():
                return export_model(self._engine, self._engine.plan.config.output_dir / "model")
        except RunError as error:
            if (path := self.finish()) is None or path.name != checkpoint_name(state.step):
                self.save(state, unrecorded)
            if (path := self.finish()) is None:
                raise
            raise RunError(f"{error}: accelerate-recipes export {path} NEW_FOLDER writes the model") from None

    def save(self, state: TrainState, unrecorded: RunningSums) -> None:
        """Writes `checkpoints/step_<steps taken>`; then a thread removes the oldest beyond `--keep_checkpoints`. If it
        fails, the run says so and continues. Raises UsageError for optimizer state that does not fit."""
        self.finish()
        self._engine.numbers.check_complete()
        self._check_buffers()
        held, layout = self._engine.shards(), self._engine.plan.layout
        dtype = export_dtype(self._engine.plan.config.export_dtype, self._engine.module)
        content = {
            "layout": describe(layout),
            "identity": self._identity,
            "schedule": curve(self._engine.plan),
            "own_flags": own_flags(self._engine.plan),
            "export_dtype": str(dtype or "kept").removeprefix("torch."),
            "state": asdict(state),
            "unrecorded": unrecorded.state_dict(self._engine, state.step),
            "trainer": self._engine.state_dict(),
        }
        if self._group.rank == 0:
            content |= {"source": source(), "versions": versions("torch", "accelerate")}
        shards = collect_shards(held, self._group.rank, self._buffers)
        if self._writer is not None:
            self._newest = self._writer.submit(self._write, shards, content).result
        else:
            path = self._write(shards, content)
            self._newest = lambda: path
        self._after_save(state.step, self.finish)

    def _check_buffers(self) -> None:
        """Raises UsageError for a buffer that the model, as it is built, could not load from a checkpoint."""
        saved = self._engine.saved_tensors().items()
        buffers = {name: tensor for name, tensor in saved if not isinstance(tensor, nn.Parameter)}
        kinds = {name: (each.shape, each.is_floating_point()) for name, each in buffers.items()}
        if self._kinds is None:
            self._kinds = kinds
        if changed := kinds.items() ^ self._kinds.items():
            raise UsageError(
                f"the buffer {min(changed)[0]} has changed its shape or type, and no checkpoint can restore that: keep "
                "both, or register it with persistent=False, or remove --save_every"
            )

    def finish(self) -> Path | None:
        """Waits for the save in progress. Returns the newest checkpoint, or None if there is none or it failed."""
        return self._newest()

    def _write(self, shards: OwnShards, content: dict[str, Any]) -> Path | None:
        config, group = self._engine.plan.config, self._group_of_writer
        folder, step = config.output_dir / "checkpoints", content["state"]["step"]
        path = folder / checkpoint_name(step)
        wait(self._removals)  # this checkpoint needs the disk space
        try:
            with self._watch.save():
                write(path, shards, content, group)
        except WriteError as error:
            self._engine.accelerator.print(
                f"the checkpoint of step {step} could not be written ({error}): earlier ones stay, the run continues"
            )
            return None
        if group.rank == 0:
            oldest = self._own(path, step)[: -config.keep_checkpoints]
            self._removals = [self._remover.submit(_remove, old) for old in oldest]
        return path

    def _own(self, newest: Path, step: int) -> list[Path]:
        """This run's checkpoints, the oldest first and the newest last. Damaged ones and another run's do not count:
        they are not removed, and do not take the place of one that could be resumed."""
        paths = [path for number, path in checkpoints(self._engine.plan.config.output_dir) if number < step]
        for path in paths:
            if path not in self._known:
                self._known[path] = False
                with suppress(DamagedError, RunError):
                    content = Reader(path).content
                    is_there = checkpoint_name(content["state"]["step"]) == path.name
                    self._known[path] = is_there and not differences(self._identity, content["identity"])
        return [*(path for path in paths if self._known[path]), newest]


def _remove(old: Path) -> None:
    try:
        remove(old)
    except OSError as error:
        print(f"{old} could not be removed ({error.strerror})", flush=True)
