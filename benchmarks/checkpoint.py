"""Seconds that a checkpoint takes to save and to load: ours beside Accelerator.save_state and load_state.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes 10 500 4000

One process, float32, AdamW: the state is the weights and two moving averages. The methods take turns,
after a warm-up of each. Ours hashes the files, flushes them to the disk and renames the folder before
the next step. save_state returns when the operating system has its files, so it is also timed with a
flush. A thread of ours then deletes the previous checkpoint, which is not timed. With --async_save
training waits for a copy only. The write in the background is timed to its end. What is loaded was just
written, so that no disk is read.
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

import accelerate
import torch
from torch import Tensor, nn

from common import RunConfig, start
from common.checkpoint.reader import Reader
from common.checkpoint.resume import Checkpoint
from common.checkpoint.save import Saver
from common.cpu_group import CpuGroup
from common.files import flush
from common.layout import Layout
from common.parallel.prepare import Setup, prepare
from common.plan import Plan
from common.records.unrecorded import Unrecorded
from common.state import TrainState
from common.stopping.watch import Watch

WIDTH = 512


def build(megabytes: float) -> nn.Module:
    """A chain of square layers. Weights and two moving averages take `megabytes` in float32."""
    num_layers = max(1, round(megabytes * 1e6 / 12 / WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def flush_all(folder: Path) -> None:
    """Waits until all files in `folder` are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            flush(path)


def touch_memory(path: Path, megabytes: float) -> None:
    """Writes and removes a file. A virtual machine gives free memory back after two seconds, and the next save that
    needs it waits: 2 seconds for each GB here. All saves and loads are to find it there."""
    piece = bytes(2**20)
    with path.open("wb") as file:
        for _ in range(round(megabytes)):
            file.write(piece)
    path.unlink()


def measure(megabytes: float, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """{name: (seconds that training waits, seconds until the save is done) of each round}"""
    config = RunConfig(batch_size=1, save_every=1, keep_checkpoints=1, output_dir=str(folder / "ours"))
    accelerator = start(config)
    model = build(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": model(batch["x"]).square().mean(-1)}

    plan = Plan.of(config, Layout(), 10)
    engine = prepare(Setup(accelerator, model, optimizer, forward_step, plan))
    engine.step(0, [{"x": torch.ones(1, WIDTH, device=accelerator.device)}], wants_norm=False)
    (folder / "ours").mkdir()
    theirs, group, state = folder / "theirs", CpuGroup(), TrainState()
    watch = Watch(accelerator, plan, group)
    in_front = Saver(engine, {}, group, watch)
    config.async_save = True
    beside = Saver(engine, {}, group, watch)

    def save(saver: Saver) -> Callable[[], object]:
        state.step += 1
        saver.save(state, Unrecorded())
        return saver.finish

    def save_state(flushes: bool) -> Callable[[], object]:
        accelerator.save_state(str(theirs))
        if flushes:
            flush_all(theirs)
        return lambda: True

    def load() -> Callable[[], object]:
        newest = sorted((folder / "ours" / "checkpoints").iterdir())[-1]
        checkpoint = Checkpoint(newest, Reader.verified(newest, group), [])
        checkpoint.load_weights(model)
        engine.load_parts(checkpoint.reader)
        return lambda: True

    def load_state() -> Callable[[], object]:
        accelerator.load_state(str(theirs))
        return lambda: True

    actions: dict[str, Callable[[], Callable[[], object]]] = {
        "ours": lambda: save(in_front),
        "ours, --async_save": lambda: save(beside),
        "save_state": lambda: save_state(False),
        "save_state, flushed": lambda: save_state(True),
        "load, ours": load,
        "load_state": load_state,
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            if name.startswith("save_state"):
                shutil.rmtree(theirs, ignore_errors=True)
            touch_memory(folder / "warm", megabytes)
            started = time.perf_counter()
            finish = action()
            stands_still = time.perf_counter() - started
            assert finish()
            if number:
                seconds[name].append((stands_still, time.perf_counter() - started))
            wait([*in_front._removals, *beside._removals])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 500], help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, accelerate {accelerate.__version__}"
    )
    print("| state | which | seconds that training waits | seconds until it is done | MB/s | ratio |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(megabytes, options.rounds, Path(folder))
        for name, taken in seconds.items():
            base = [total for _, total in seconds["load_state" if "load" in name else "save_state, flushed"]]
            still, total = zip(*taken)
            columns = [
                f"{megabytes:g} MB",
                name,
                summary(still),
                summary(total),
                f"{megabytes / statistics.median(total):.0f}",
                summary([one / other for one, other in zip(still, base)], 2),
            ]
            print(f"| {' | '.join(columns)} |", flush=True)


def summary(values: Sequence[float], digits: int = 3) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
