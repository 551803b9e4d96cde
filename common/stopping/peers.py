"""A thread that ends this process after another process of the run has failed."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from torch import distributed as dist

from common.cpu_group import CpuGroup
from common.errors import RunError, first_failure
from common.records.run_card import write_failure
from common.stopping.exit import end, report

STUCK_S = 5.0  # a collective with a process that has ended mostly raises an error sooner, which says more
FAILED = "peers/failed"


class PeerWatch:
    """Ends this process if another one has failed and this one has not moved for 5 seconds.

    A process that waits on a GPU for a process that has ended runs no Python code: it meets no error and handles no
    signal. Without this thread it would wait for the launcher's SIGKILL, 30 seconds or more.

    A failure on another machine shows in torchrun's store, if that process could still report it.

    Args:
        group: of all processes.
        output_dir: of the run.
        idle_s: returns the seconds since the last movement of this process; 0 during a save.
    """

    def __init__(self, group: CpuGroup, output_dir: Path, idle_s: Callable[[], float]):
        self.group, self.output_dir, self.idle_s = group, output_dir, idle_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        if self.group.size == 1:
            return
        # Its own connection, because other threads may be blocked on theirs. torch's stub lacks `clone`.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        launcher = (socket.gethostname(), os.environ.get("GROUP_RANK"), os.getppid())
        processes = self.group.all_gather((launcher, os.getpid()))
        self._siblings = {
            rank: psutil.Process(pid)
            for rank, (other, pid) in enumerate(processes)
            if other == launcher and rank != self.group.rank
        }
        self._thread.start()

    def stop(self, failed: bool) -> None:
        """Tells the other processes how this one ends, and ends the thread."""
        if self.group.size == 1:
            return
        self._stop.set()
        with suppress(RuntimeError):  # the store may have ended with the launcher
            self._store.set(FAILED if failed else f"peers/done/{self.group.rank}", str(self.group.rank))
        self._thread.join(STUCK_S)

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            if self.idle_s() < STUCK_S:
                continue
            failed = self._failed()
            if failed is not None and self.idle_s() >= STUCK_S and not self._stop.is_set():
                error = RunError(f"process {failed} has ended; the launcher's report says how")
                write_failure(self.output_dir, first_failure(error))
                report(error)
                end(error)

    def _failed(self) -> int | None:
        """The rank of a process that has failed."""
        with suppress(RuntimeError):
            if self._store.check([FAILED]):
                return int(self._store.get(FAILED))
        for rank, process in self._siblings.items():
            if not _is_running(process):
                with suppress(RuntimeError):
                    if self._store.check([f"peers/done/{rank}"]):
                        continue
                return rank
        return None


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
