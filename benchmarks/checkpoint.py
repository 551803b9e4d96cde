"""Seconds that a run stands still for a checkpoint, ours beside Accelerator.save_state.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes 10 500 4000

One process, float32, AdamW: the state is weights and two averages. The two take turns, after a
warm-up each. Ours is flushed to the disk, hashed, and published by a rename before the next step;
save_state is done when it has handed its files to the operating system; so it is also timed with a
flush of them. To delete the one before is not part of its time; of ours it is.
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import accelerate
import torch
from torch import Tensor, nn

from common import RunConfig, start
from common.checkpoint import save_checkpoint
from common.group import CpuGroup
from common.plan import Plan
from common.state import TrainState
from common.step import prepare

WIDTH = 512


def build(megabytes: float) -> nn.Module:
    """A chain of square layers whose weights, and two averages of each, take so much in float32."""
    num_layers = max(1, round(megabytes * 1e6 / 12 / WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def flush_all(folder: Path) -> None:
    """Waits until all files in it are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(megabytes: float, rounds: int, folder: Path) -> dict[str, list[float]]:
    """{which: seconds of each round}"""
    config = RunConfig(batch_size=1, save_every=1, keep_checkpoints=1, output_dir=str(folder / "ours"))
    accelerator = start(config)
    model = build(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": model(batch["x"]).square().mean(-1)}

    trainer = prepare(accelerator, model, optimizer, forward_step, Plan.of(config, 10, 1, 0))
    trainer.step([{"x": torch.ones(1, WIDTH, device=accelerator.device)}], wants_norm=False)
    (folder / "ours").mkdir()
    theirs, group, step = folder / "theirs", CpuGroup(), 0

    def ours() -> None:
        nonlocal step
        step += 1
        assert save_checkpoint(trainer, TrainState(step=step), {}, group)

    def save_state() -> None:
        accelerator.save_state(str(theirs))

    def save_state_flushed() -> None:
        save_state()
        flush_all(theirs)

    actions = {"ours": ours, "save_state": save_state, "save_state, flushed": save_state_flushed}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            shutil.rmtree(theirs, ignore_errors=True)
            taken = timed(action)
            if number:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 500], help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, accelerate {accelerate.__version__}"
    )
    print("| state | which | seconds, median (min to max) | MB/s | ratio to save_state, flushed |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(megabytes, options.rounds, Path(folder))
        for name, taken in seconds.items():
            ratios = [one / other for one, other in zip(taken, seconds["save_state, flushed"])]
            median = statistics.median(taken)
            columns = [
                f"{megabytes:g} MB",
                name,
                f"{median:.3f} ({min(taken):.3f} to {max(taken):.3f})",
                f"{megabytes / median:.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
            print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
