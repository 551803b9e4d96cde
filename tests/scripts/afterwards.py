"""A recipe that trains nothing. Afterwards the main process waits for the end of all others; AFTERWARDS=memory: it runs
out of memory."""

import os
import time
from typing import Any

import psutil
import torch

from accelerate_recipes import RunConfig, run, start
from accelerate_recipes.common.cpu_group import CpuGroup


def wait_for_the_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if os.environ.get("AFTERWARDS") == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    print("alone", torch.distributed.is_initialized(), flush=True)


def main(config: RunConfig) -> Any:
    start(config)
    pids = CpuGroup().all_gather(os.getpid())
    return lambda: wait_for_the_end_of(pids[1:])


if __name__ == "__main__":
    run(main, RunConfig)
