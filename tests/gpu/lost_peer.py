"""Process 1 kills itself while process 0 waits for a GPU that is busy for minutes (without a GPU, for a mutex)."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.stopping.watchdog import Watchdog

folder = Path(sys.argv[-1])
dist.init_process_group("gloo")
group = CpuGroup()
Watchdog(group, folder, timeout=0).start()
if group.rank == 1:
    time.sleep(1)
    (folder / "ended").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: None)  # as recipes do, to save before they end
if torch.cuda.is_available():
    torch.cuda._sleep(10**12)
    torch.cuda.synchronize()
else:
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
