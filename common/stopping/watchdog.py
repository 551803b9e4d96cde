"""A thread that ends a process if its main thread hangs or waits for a lost process."""

import faulthandler
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from torch import distributed as dist

from ..cpu_group import CpuGroup
from ..environment import Environment
from ..errors import HangError, RunError
from ..failure import ReportedErrors, end, first_failure
from ..records.run_card import ending, read_card, replace_card

STUCK_S = 5.0  # without progress; usually the collective fails sooner, with a better message
ANSWER_S = 5.0  # how long this process waits for torchrun's store and for what the others write there


class Watchdog:
    """Ends this process if it makes no progress.

    After `timeout` seconds it is a hang: the message names the process that does not answer or is furthest behind.
    After 5 seconds this process ends if another one has failed. Otherwise the main thread of a process that waits on a
    GPU would wait for the launcher's SIGKILL, 30 seconds or more: it raises no error and cannot act on a signal. A
    process of another machine is known to have failed if it could still say so in torchrun's store. 0: no timeout.
    """

    _numbers = itertools.count()  # of the runs in this process, the same in all processes: keys stay in the store

    def __init__(self, group: CpuGroup, output_dir: Path, timeout: float):
        self.group, self.output_dir, self.timeout = group, output_dir, timeout
        self._count, self._last, self._num_saves = 0, time.monotonic(), 0
        self._keys = f"watchdog/{next(self._numbers)}"
        self._store: Any = None
        self._siblings: dict[int, psutil.Process] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._asker = threading.Thread()

    def start(self) -> None:
        """Starts the thread. A collective: all processes must call it."""
        self.progress()
        if self.group.size > 1:
            # A second connection, because the main thread may be blocked on the first. torch's stub lacks `clone`.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            launcher = (socket.gethostname(), Environment.read().machine_rank, os.getppid())
            for rank, (other, pid) in enumerate(self.group.all_gather((launcher, os.getpid()))):
                if other == launcher and rank != self.group.rank:
                    with suppress(psutil.NoSuchProcess):  # in another namespace of process ids
                        self._siblings[rank] = psutil.Process(pid)
        if self.group.size > 1 or self.timeout:
            self._thread.start()

    def stop(self, failed: bool) -> None:
        """Ends the thread, and tells the others whether this process ends alone (`failed`) or all end by agreement."""
        self._stop.set()
        self._ask(lambda: self._set("failed" if failed else f"done/{self.group.rank}", self.group.rank))
        if self._thread.is_alive():
            self._thread.join()  # it must not use the store while the process group is destroyed

    def progress(self) -> None:
        """Reports progress of this process, which restarts the timeout."""
        self._count, self._last = self._count + 1, time.monotonic()

    @contextmanager
    def save(self) -> Iterator[None]:
        """Surrounds the write of a checkpoint. Within it, the failure of another process does not end this one."""
        self._num_saves += 1
        try:
            yield
        finally:
            self._num_saves -= 1
            self.progress()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 4 or 1.0)):
            if self.timeout and time.monotonic() - self._last > self.timeout:
                self._end(HangError(self._describe_hang()))
            elif self._is_stuck() and (lost := self._ask(self._lost_process)) is not None and self._is_stuck():
                self._end(RunError(f"process {lost} has ended; see the launcher's report"))

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._last > STUCK_S and not self._num_saves

    def _end(self, error: RunError) -> None:
        if self._stop.is_set():  # the main thread failed or finished in the meantime
            return
        if isinstance(error, HangError) or read_card(self.output_dir).get("status") == "running":
            # Else the failed process wrote its reason.
            replace_card(self.output_dir, read_card(self.output_dir) | ending(first_failure(error)))
        ReportedErrors().record_exception(error)  # `run` does that for the main thread
        end(error)

    def _ask(self, ask: Callable[[], Any]) -> Any:
        """Calls a function that uses the store. Returns its result; None if it has none in time."""
        if self._store is None:
            return None
        results: list[Any] = []
        # In another thread, one call at a time, because the store may never answer if the network is down.
        if self._asker.is_alive():
            self._asker.join(ANSWER_S)
        if not self._asker.is_alive():
            self._asker = threading.Thread(target=lambda: results.append(ask()), daemon=True)
            self._asker.start()
            self._asker.join(ANSWER_S)
        return results[0] if results else None

    def _set(self, name: str, value: object) -> None:
        with suppress(RuntimeError):  # the store has ended with the launcher
            self._store.set(f"{self._keys}/{name}", json.dumps(value))

    def _get(self, name: str) -> Any:
        """The value that a process has set under this name, or None."""
        key = f"{self._keys}/{name}"
        with suppress(RuntimeError):
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _lost_process(self) -> int | None:
        """The rank of a process that has failed; None if none has."""
        if (lost := self._get("failed")) is not None:
            return lost
        for rank, process in self._siblings.items():
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    continue
            if self._get(f"done/{rank}") is None:
                self._set("failed", rank)  # for the processes of other machines
                return rank
        return None

    def _describe_hang(self) -> str:
        path = self.output_dir / f"stacks_{self.group.rank:05d}.txt"
        with suppress(OSError), path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        answers = {self.group.rank: self._position()}
        self._ask(lambda: self._exchange(answers))
        positions = dict(answers)  # the exchange may continue
        if silent := [rank for rank in range(self.group.size) if rank not in positions]:
            culprit = f"process {silent[0]} does not answer"
        else:
            # The process with the least progress; on a tie, one that does not wait for others.
            rank = min(positions, key=lambda rank: (positions[rank]["count"], positions[rank]["waits"], rank))
            culprit = f"process {rank} did not arrive, it is at {positions[rank]['place']}"
        return f"no step for {self.timeout:g} s: {culprit}; the stacks are in {self.output_dir}/stacks_*.txt"

    def _position(self) -> dict[str, Any]:
        """Where the main thread is, and how far it has got."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place, waits = None, False
        while frame is not None:
            path = frame.f_code.co_filename
            # Not torch/distributed/elastic: it calls main, so it is in every stack.
            waits = waits or re.search("torch/(autograd|cuda|distributed/(?!elastic))", path) is not None
            if place is None and "site-packages" not in path and "lib/python" not in path:
                place = f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return {"count": self._count, "waits": waits, "place": place}

    def _exchange(self, positions: dict[int, dict[str, Any]]) -> None:
        """Adds the positions of the processes that answer in time to this one's."""
        self._set(f"position/{self.group.rank}", positions[self.group.rank])
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and len(positions) < self.group.size:
            for rank in range(self.group.size):
                if rank not in positions and (position := self._get(f"position/{rank}")):
                    positions[rank] = position
            time.sleep(0.1)
