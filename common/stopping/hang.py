"""Detects a hang, names the process that causes it, and ends the run."""

import faulthandler
import itertools
import json
import re
import sys
import threading
import time
from types import FrameType
from typing import Any

from torch import distributed as dist

from ..cpu_group import CpuGroup
from ..errors import HangError, first_failure
from ..plan import Plan
from ..records.run_card import write_failure
from .exit import end, report

ANSWER_S = 3.0  # how long a hanging process waits for the positions of the others


class HangWatch:
    """A thread that ends the run when `progress` has not been called for `--hang_timeout` seconds."""

    _numbers = itertools.count()  # of the runs in this process, the same in all processes: keys stay in the store

    def __init__(self, plan: Plan, group: CpuGroup):
        self.timeout, self.output_dir, self.group = plan.config.hang_timeout, plan.config.output_dir, group
        self._count, self._last = 0, time.monotonic()
        self._stop = threading.Event()
        # A second connection, because the main thread may be blocked on the first. torch's stub lacks `clone`.
        self._store: dist.Store | None = None
        if group.size > 1:
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._keys = f"hang/{next(self._numbers)}"
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self.progress()
        if self.timeout:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self.timeout:
            self._thread.join()  # it must not use the store while the process group is destroyed

    @property
    def idle_s(self) -> float:
        """Seconds since the last call of `progress`."""
        return time.monotonic() - self._last

    def progress(self) -> None:
        self._count, self._last = self._count + 1, time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            if self.idle_s > self.timeout:
                error = HangError(self._report())
                if not self._stop.is_set():  # else the main thread failed or finished in the meantime
                    write_failure(self.output_dir, first_failure(error))
                    report(error)
                    end(error)

    def _report(self) -> str:
        stacks = self.output_dir / f"stacks_{self.group.rank:05d}.txt"
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        reports = self._exchange(self._position())
        line = f"no step for {self.timeout:g} s: "
        silent = [rank for rank in range(self.group.size) if rank not in reports]
        if silent:
            line += f"process {silent[0]} does not answer"
        else:
            # The process with the least progress; on a tie, one that does not wait for others.
            rank, report = min(reports.items(), key=lambda item: (item[1]["count"], item[1]["waits"], item[0]))
            line += f"process {rank} did not arrive, it is at {report['place']}"
        return f"{line}; the stacks are in {self.output_dir}/stacks_*.txt"

    def _position(self) -> dict[str, Any]:
        assert self._main is not None
        frame: FrameType | None = sys._current_frames()[self._main]
        place, waits = None, False
        while frame is not None:
            path = frame.f_code.co_filename
            # Not torch/distributed/elastic: it calls main, so it is in every stack.
            waits = waits or re.search("torch/(autograd|cuda|distributed/(?!elastic))", path) is not None
            if place is None and "site-packages" not in path and "lib/python" not in path:
                place = f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return {"count": self._count, "waits": waits, "place": place}

    def _exchange(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """{rank: position} of the processes that answer in time."""
        found = {self.group.rank: own}
        if self._store is not None:
            # In another thread, because the store may never answer if the network is down.
            asker = threading.Thread(target=self._ask, args=(self._store, own, found), daemon=True)
            asker.start()
            asker.join(ANSWER_S + min(2.0, self.timeout / 2))
        return dict(found)

    def _ask(self, store: dist.Store, own: dict[str, Any], found: dict[int, dict[str, Any]]) -> None:
        store.set(f"{self._keys}/{self.group.rank}", json.dumps(own))
        while missing := [rank for rank in range(self.group.size) if rank not in found]:
            for rank in missing:
                if store.check([f"{self._keys}/{rank}"]):
                    found[rank] = json.loads(store.get(f"{self._keys}/{rank}"))
            time.sleep(0.1)
