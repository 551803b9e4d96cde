"""Small collectives on the CPU (gloo), apart from the GPUs' traffic."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist


def collective_timeout(hang_timeout: float) -> timedelta:
    """A time longer than `--hang_timeout`, so that the watchdog ends the run first and names the missing process."""
    return timedelta(seconds=hang_timeout + 300) if hang_timeout else timedelta(days=30)


class CpuGroup:
    """Collectives of all processes; no-ops with a single process. All processes must call them in the same order."""

    def __init__(self, hang_timeout: float = 0) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.size > 1 else 0
        # A separate group: its pending operations never delay the default group.
        timeout = collective_timeout(hang_timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    def all_gather(self, value: Any) -> list[Any]:
        """The value of each process, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in rank order, in rank 0; nothing in the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group)
        return values or []

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def sum_async(self, values: list[float]) -> Callable[[], list[float]]:
        """Starts sums over all processes, in float32. The returned function waits for the sums, and returns them."""
        if self.size == 1:
            return lambda: values
        vector = torch.tensor(values)
        work = dist.all_reduce(vector, group=self._group, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return vector.tolist()

        return wait
