"""A thread that ends this process after another process of the run has failed."""

import itertools
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from torch import distributed as dist

from ..cpu_group import CpuGroup
from ..errors import RunError, first_failure
from ..records.run_card import read_card, write_failure
from .exit import end, report

STUCK_S = 5.0  # mostly the collective fails sooner, with a better message


class PeerWatch:
    """Ends this process if another one has failed and this one has made no progress for 5 seconds.

    The main thread of a process that waits on a GPU for a process that has ended is blocked: it raises no error and
    cannot act on a signal. Without this thread it would wait for the launcher's SIGKILL, 30 seconds or more.

    A process of another machine is known to have failed if it could still say so in torchrun's store.

    Args:
        group: of all processes.
        output_dir: of the run.
        idle_s: returns the seconds since the last progress of this process; 0 during a save.
    """

    _numbers = itertools.count()  # of the runs in this process, the same in all processes: keys stay in the store

    def __init__(self, group: CpuGroup, output_dir: Path, idle_s: Callable[[], float]):
        self.group, self.output_dir, self.idle_s = group, output_dir, idle_s
        self._keys = f"peers/{next(self._numbers)}"
        self._siblings: dict[int, psutil.Process] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        if self.group.size == 1:
            return
        # Its own connection, because other threads may be blocked on theirs. torch's stub lacks `clone`.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        launcher = (socket.gethostname(), os.environ.get("GROUP_RANK"), os.getppid())
        processes = self.group.all_gather((launcher, os.getpid()))
        for rank, (other, pid) in enumerate(processes):
            if other == launcher and rank != self.group.rank:
                with suppress(psutil.NoSuchProcess):  # in another namespace of process ids
                    self._siblings[rank] = psutil.Process(pid)
        self._thread.start()

    def stop(self, failed: bool) -> None:
        """Reports to the other processes how this one ends, and ends the thread.

        Args:
            failed: whether this process ends alone, and not by an agreement of all.
        """
        if self.group.size == 1:
            return
        self._stop.set()
        # In a thread, because the store does not answer if the network is lost.
        key = "failed" if failed else f"done/{self.group.rank}"
        reporter = threading.Thread(target=self._report, args=(key, self.group.rank), daemon=True)
        reporter.start()
        reporter.join(STUCK_S)
        self._thread.join(STUCK_S)

    def _report(self, key: str, rank: int) -> None:
        with suppress(RuntimeError):  # the store may have ended with the launcher
            self._store.set(f"{self._keys}/{key}", str(rank))

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            if self.idle_s() < STUCK_S:
                continue
            failed = self._failed()
            if failed is not None and self.idle_s() >= STUCK_S and not self._stop.is_set():
                error = RunError(f"process {failed} has ended; the launcher's report says how")
                self._report("failed", failed)  # for the processes of other machines
                if read_card(self.output_dir).get("status") == "running":  # else the failed process wrote its reason
                    write_failure(self.output_dir, first_failure(error))
                report(error)
                end(error)

    def _failed(self) -> int | None:
        """The rank of a process that has failed; None if none has."""
        with suppress(RuntimeError):
            if self._store.check([f"{self._keys}/failed"]):
                return int(self._store.get(f"{self._keys}/failed"))
        for rank, process in self._siblings.items():
            if not _is_running(process):
                with suppress(RuntimeError):
                    if self._store.check([f"{self._keys}/done/{rank}"]):
                        continue
                return rank
        return None


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
