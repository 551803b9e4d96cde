"""Seconds, flushes and memory that a checkpoint takes to save and to load, and a model to export: ours beside
Accelerator.save_state and load_state, and transformers' save_pretrained.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes 10 500 4000

One process, float32, AdamW: the state is the weights and two moving averages. The methods take turns, after a warm-up
of each, in an order that is drawn anew in each round. Each one starts when the disk has done all earlier work: else its
flush waits for what others have written, and frees the blocks of what they have removed. Ours hashes the files, flushes
them to the disk and renames the folder before the next step. save_state returns when the operating system has its
files, so it is also timed with a flush. A thread of ours then deletes the previous checkpoint, which is not timed. With
--async_save training waits for a copy only. The write in the background is timed to its end. What is loaded was just
written, so that no disk is read. Ours flushes an export, too, and save_pretrained does not: it is timed with and
without. The ratios are to the flushed ones of the others, and to load_state. The memory is the most anonymous memory
(RssAnon) beside what was there before; Linux only.
"""

import argparse
import gc
import os
import platform
import random
import shutil
import stat
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple

import accelerate
import torch
from torch import Tensor, nn

from accelerate_recipes import RunConfig, start
from accelerate_recipes.common.checkpoint.exported import export_model
from accelerate_recipes.common.checkpoint.reader import Reader
from accelerate_recipes.common.checkpoint.resume import Checkpoint
from accelerate_recipes.common.checkpoint.save import Saver
from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.files import flush
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.parallel.strategies import prepare
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.records.running_sums import RunningSums
from accelerate_recipes.common.state import TrainState
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.common.stopping.watch import Watch
from accelerate_recipes.common.tasks.models.causal_lm import with_losses

CONTEXT = 8


def build(megabytes: float) -> nn.Module:
    """A Llama with layers of 12.6 million weights. Weights and two moving averages take `megabytes` in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 1024 if megabytes > 100 else 128
    num_layers = max(1, round(megabytes * 1e6 / 12 / (12 * width**2)))
    shape = LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
    )
    return with_losses(LlamaForCausalLM(shape))


class Peak(threading.Thread):
    """The most anonymous memory of this process in a `with` block, beside that at its start, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.megabytes, self._ended = 0.0, threading.Event()

    def run(self) -> None:
        before = self._now()
        while not self._ended.wait(0.005):
            self.megabytes = max(self.megabytes, self._now() - before)

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def _now(self) -> float:
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon")), 0.0)


class Flushes:
    """Counts the flushes of files and folders, and their seconds, in a `with` block."""

    def __init__(self) -> None:
        self.files = self.folders = 0
        self.seconds, self._fsync = 0.0, os.fsync

    def __enter__(self) -> "Flushes":
        os.fsync = self._counted  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        os.fsync = self._fsync

    def _counted(self, descriptor: int) -> None:
        is_folder, started = stat.S_ISDIR(os.fstat(descriptor).st_mode), time.perf_counter()
        self._fsync(descriptor)
        self.seconds += time.perf_counter() - started
        self.folders += is_folder
        self.files += not is_folder


class Cost(NamedTuple):
    """Of one call: seconds that training waits, seconds and CPU seconds until it is done, MB of memory, and flushes."""

    waits: float
    done: float
    cpu: float
    memory: float
    flushes: Flushes


def flush_all(folder: Path) -> None:
    """Waits until all files in `folder` are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            flush(path)


def touch_memory(path: Path, megabytes: float) -> None:
    """Writes and removes a file of twice the size. A virtual machine gives free memory back after two seconds, and the
    next save that needs it waits: a write of 500 MB took 0.57 s of system time here, after touching as much 0.39 s,
    after twice as much 0.11 s. Flush and digest took the same. All saves and loads are to find it there."""
    piece = bytes(2**20)
    with path.open("wb") as file:
        for _ in range(2 * round(megabytes)):
            file.write(piece)
    path.unlink()


Action = Callable[[], Callable[[], object]]  # returns what waits until it is done


def prepared(megabytes: float, folder: Path) -> tuple[dict[str, Action], Callable[[], object]]:
    """({name: action}, waits until earlier checkpoints are removed)."""
    config = RunConfig(batch_size=1, save_every=1, keep_checkpoints=1, output_dir=str(folder / "ours"))
    accelerator = start(config)
    model = build(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": model(batch["x"], batch["x"])}

    plan = Plan.of(config, Layout(), 10)
    engine = prepare(Setup(accelerator, model, optimizer, forward_step, plan))
    engine.step(0, [{"x": torch.ones(1, CONTEXT, dtype=torch.long, device=accelerator.device)}], wants_norm=False)
    (folder / "ours").mkdir()
    theirs, group, state = folder / "theirs", CpuGroup(), TrainState()
    watch = Watch(accelerator, plan, group)
    in_front = Saver(engine, {"samples": {}}, group, watch, lambda step, finish: None)
    config.async_save = True
    beside = Saver(engine, {"samples": {}}, group, watch, lambda step, finish: None)

    def save(saver: Saver) -> Callable[[], object]:
        state.step += 1
        saver.save(state, RunningSums())
        return saver.finish

    def save_state(flushes: bool) -> Callable[[], object]:
        accelerator.save_state(str(theirs))
        if flushes:
            flush_all(theirs)
        return lambda: True

    def load() -> Callable[[], object]:
        newest = sorted((folder / "ours" / "checkpoints").iterdir())[-1]
        checkpoint = Checkpoint(newest, Reader.open_verified(newest, group), [])
        checkpoint.load_weights(model)
        engine.load_parts(checkpoint.reader)
        return lambda: True

    def load_state() -> Callable[[], object]:
        accelerator.load_state(str(theirs))
        return lambda: True

    def export() -> Callable[[], object]:
        export_model(engine, folder / "model")
        return lambda: True

    def save_pretrained(flushes: bool) -> Callable[[], object]:
        engine.module.save_pretrained(folder / "model")
        if flushes:
            flush_all(folder / "model")
        return lambda: True

    actions: dict[str, Action] = {
        "ours": lambda: save(in_front),
        "ours, --async_save": lambda: save(beside),
        "save_state": lambda: save_state(False),
        "save_state, flushed": lambda: save_state(True),
        "load, ours": load,
        "load_state": load_state,
        "export, ours": export,
        "save_pretrained": lambda: save_pretrained(False),
        "save_pretrained, flushed": lambda: save_pretrained(True),
    }
    return actions, lambda: wait([*in_front._removals, *beside._removals])


def measure(megabytes: float, rounds: int, order: random.Random, folder: Path) -> dict[str, list[Cost]]:
    """{name: the cost in each round}"""
    actions, wait_for_removals = prepared(megabytes, folder)
    costs: dict[str, list[Cost]] = {name: [] for name in actions}
    names = [*actions]
    for number in range(rounds + 1):
        for name in names:
            for left in ("model", *["theirs"] * name.startswith("save_state")):  # nobody removes an earlier one
                shutil.rmtree(folder / left, ignore_errors=True)
            os.sync()
            touch_memory(folder / "warm", megabytes)
            gc.collect()
            with Peak() as peak, Flushes() as flushes:
                started, cpu = time.perf_counter(), time.process_time()
                finish = actions[name]()
                waits = time.perf_counter() - started
                assert finish()
                done, cpu = time.perf_counter() - started, time.process_time() - cpu
            if number:
                costs[name].append(Cost(waits, done, cpu, peak.megabytes, flushes))
            wait_for_removals()
        order.shuffle(names)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 500], help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args()
    versions = f"torch {torch.__version__}, accelerate {accelerate.__version__}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {versions}, seed {options.seed}")
    print(
        "| state | which | seconds that training waits | until it is done | ratio | ratio of CPU seconds | "
        "flushes: files + folders | seconds of flushes | memory |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    bases = {"load": "load_state", "expo": "save_pretrained, flushed", "save_p": "save_pretrained, flushed"}
    order = random.Random(options.seed)
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            costs = measure(megabytes, options.rounds, order, Path(folder))
        for name, own in costs.items():
            base = costs[next((base for start, base in bases.items() if name.startswith(start)), "save_state, flushed")]
            columns = [
                f"{megabytes:g} MB",
                name,
                f"{statistics.median(cost.waits for cost in own):.3f}",
                f"{statistics.median(cost.done for cost in own):.3f}",
                summary([one.waits / other.done for one, other in zip(own, base)]),
                summary([one.cpu / other.cpu for one, other in zip(own, base)]),
                f"{own[-1].flushes.files} + {own[-1].flushes.folders}",
                f"{statistics.median(cost.flushes.seconds for cost in own):.3f}",
                f"{max(cost.memory for cost in own):.0f} MB",
            ]
            print(f"| {' | '.join(columns)} |", flush=True)


def summary(values: Sequence[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
