"""Measures the network between the processes of a job. Run it in place of a recipe, with the same launcher and config.

    accelerate launch --config_file accelerate_configs/ddp.yaml launchers/network.py

Prints the time of an all-reduce, the collective that averages gradients, for each message size, and then for each pair
of machines, to find a slow link. Uses NCCL on GPUs and gloo without GPUs. Bandwidths are defined as in nccl-tests:
"algorithm" is size / time; "bus" is 2 (n - 1) / n times that, the load on each link, to compare with the link's rated
bandwidth (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

import itertools
import os
import socket
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import distributed as dist

from accelerate_recipes import RunConfig, flag, run, start
from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.errors import UsageError

WARM_UP = 3
OF_PAIRS = (4, 16 * 2**20)  # bytes


@dataclass(kw_only=True)
class Config(RunConfig):
    max_megabytes: int = flag(64, "largest message, in MiB", minimum=1)
    repetitions: int = flag(20, "measurements per message size", minimum=1)


def row(name: str, num_bytes: int, config: Config, device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Measures all-reduces in a group and returns a row of the table."""
    numbers, seconds = torch.zeros(num_bytes // 4, device=device), []
    for _ in range(WARM_UP + config.repetitions):
        dist.barrier(group)
        started = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    seconds, size = seconds[WARM_UP:], dist.get_world_size(group)
    median = statistics.median(seconds)
    times = f"{median * 1e6:,.0f} ({min(seconds) * 1e6:,.0f} to {max(seconds) * 1e6:,.0f})"
    algorithm = num_bytes / median / 1e9
    return f"| {name} | {num_bytes:,} | {times} | {algorithm:.3f} | {algorithm * 2 * (size - 1) / size:.3f} |"


def main(config: Config) -> None:
    accelerator = start(
        replace(config, batch_size=Environment.read().world_size)
    )  # a multiple of the number of processes
    num_processes, device = accelerator.num_processes, accelerator.device
    if num_processes == 1:
        raise UsageError("one process has no network to measure: use --num_processes 2 after accelerate launch")
    everybody = CpuGroup()
    show = partial(print, flush=True) if everybody.rank == 0 else lambda *_: None
    show("\n| between | bytes | microseconds, median (min to max) | algorithm GB/s | bus GB/s |")
    show("| --- | ---: | ---: | ---: | ---: |")
    num_bytes = 4
    while num_bytes <= config.max_megabytes * 2**20:
        show(row(f"all {num_processes} processes", num_bytes, config, device))
        num_bytes *= 16
    # One process per machine. All processes must create all groups, in the same order.
    machines = {machine: rank for rank, machine in reversed([*enumerate(everybody.all_gather(_machine()))])}
    for (one, one_rank), (other, other_rank) in itertools.combinations(sorted(machines.items()), 2):
        group = dist.new_group([one_rank, other_rank])
        lines = ""
        if accelerator.process_index in (one_rank, other_rank):
            lines = "\n".join(row(f"{one} and {other}", size, config, device, group) for size in OF_PAIRS)
        show(everybody.all_gather(lines)[one_rank])


def _machine() -> str:
    return f"machine {os.environ.get('GROUP_RANK', 0)} ({socket.gethostname()})"


if __name__ == "__main__":
    run(main, Config)
