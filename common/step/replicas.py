"""Checks during a run that replicas of the same weights stay equal."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cpu_group import CpuGroup
from ..errors import UsageError
from ..norms import relative_distance
from ..weights.shards import local, shards_of
from .setup import Setup

EXACT = (1 << 52) - 1  # a float64 holds each whole number up to this one
MOST = 6  # sets of processes that share weights: all, those of a stage, of the same shard, of the same experts, ...
# Processors of different kinds round differently: processes' weights may differ this much, relative to their norm.
ROUNDING = 1e-5
CAUSES = {  # by whether a buffer differs
    False: "a weight unfrozen late, a change of weights in one process, a gradient outside forward_step, or bad memory",
    True: "the model begins to change this buffer, and each process has different samples; register it before fit with "
    "values that do not depend on samples, or use --config_file accelerate_configs/single.yaml",
}
ShardKey = tuple[str, tuple[int, ...]]  # (name of a weight, offsets of a shard)


class Replicas:
    """Compares the bits of weights that several processes hold.

    Each process adds up the bits of the shards that it shares with the same other processes. The sums are sent with
    a training record's sums. Buffers that differ after the checked steps, such as BatchNorm's, may differ. `tensors`
    and `holders` are the engine's.
    """

    def __init__(self, setup: Setup, tensors: Callable[[], dict[str, Tensor]], holders: Callable[[str], Sequence[int]]):
        self._accelerator, self._plan, self._tensors, self._holders = setup.accelerator, setup.plan, tensors, holders
        self._optimizer = setup.optimizer
        self.agreed = 0  # steps after which the processes last agreed; 0 before the first comparison
        self._compares = self._plan.layout.num_processes > 1
        self._buffers: frozenset[str] = frozenset()  # buffers that are compared

    def compare_buffers(self, group: CpuGroup) -> None:
        """From now on, compares the buffers that are equal in all processes now. A collective."""
        own = {
            name: int(sum_of_bits(each)) for name, each in self._tensors().items() if not isinstance(each, nn.Parameter)
        }
        found = group.all_gather(own)
        self._buffers = frozenset(name for name in own if len({each[name] for each in found if name in each}) == 1)
        vars(self).pop("shared", None)

    def bits(self) -> dict[str, Tensor]:
        """{name of a weight: the sum of the bits of this process's part}, for weights that are trained or that other
        processes hold, too. ZeRO-3 keeps that part next to the weight."""
        weights = {name: each for name, each in self._tensors().items() if self._is_compared(name, each)}
        held = {name: each if each.numel() else getattr(each, "ds_tensor", each) for name, each in weights.items()}
        return {name: sum_of_bits(local(part).detach()) for name, part in held.items()}

    def rows(self, bits: Mapping[str, Tensor]) -> Tensor:
        """float64 of shape (processes, 7, 2), zero except in this process's row: for each set of processes with which
        it shares weights [which weights, their bits], and the same for the numbers in the optimizer's parameter groups.
        `drift` takes the sum over the processes. `bits`: this one's."""
        layout, device = self._plan.layout, self._accelerator.device
        rows = torch.zeros(layout.num_processes, MOST + 1, 2, dtype=torch.float64, device=device)
        if self._compares:
            if gone := [name for keys in self.shared.values() for name, _ in keys if name not in bits]:
                raise UsageError(f"the model no longer has the weight {gone[0]}: prune or replace weights before fit")
            for column, each in enumerate(zip(*self._numbers().items())):
                rows[layout.rank, MOST, column] = zlib.crc32(repr(each).encode())
            for column, keys in enumerate([*self.shared.values()][:MOST]):
                rows[layout.rank, column, 0] = zlib.crc32(repr(keys).encode())
                rows[layout.rank, column, 1] = sum_of_sums([bits[name] for name, _ in keys], device)
        return rows

    def drift(self, rows: Sequence[float], step: int) -> str | None:
        """Which two processes hold different weights; None if all are equal. The same in all processes, and a
        collective if bits differ. `rows`: the sum over all processes of the result of `rows`, flattened."""
        pairs = {*zip(rows[::2], rows[1::2])}
        if len(pairs) > len({which for which, _ in pairs}):
            return self._first_difference()
        self.agreed = step
        return None

    def _numbers(self) -> dict[str, float]:
        """Numbers of the parameter groups by name, such as the learning rate; not what sparse gradients change."""
        return {
            f"{name} of group {number}": value
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, int | float) and name != "fused"
        }

    def _is_compared(self, name: str, tensor: Tensor) -> bool:
        return (self._compares or tensor.requires_grad) and (isinstance(tensor, nn.Parameter) or name in self._buffers)

    @cached_property
    def shared(self) -> dict[Sequence[int], list[ShardKey]]:
        """{ranks of the processes that hold them: shards of weights that other processes also hold}"""
        found: dict[Sequence[int], list[ShardKey]] = {}
        for name, tensor in self._tensors().items():
            if self._is_compared(name, tensor):
                for shard in shards_of(name, tensor, self._holders(name)):
                    if len(shard.writers) > 1 and shard.sizes == local(tensor).shape:
                        found.setdefault(shard.writers, []).append((name, shard.offsets))
        return found

    def _first_difference(self) -> str | None:
        """Compares weight by weight. A collective."""
        rank, tensors, own = self._plan.layout.rank, self._tensors(), self.bits()
        group = CpuGroup(self._plan.config.hang_timeout)  # the whole weights below may not fit on a GPU
        first, *others = group.all_gather(self._numbers())
        for number, other in enumerate(others, start=1):
            for name in [name for name in first if first.keys() == other.keys() and first[name] != other[name]]:
                return (
                    f"process {number} has {other[name]:g} as {name} of the optimizer, process 0 has {first[name]:g}. "
                    "Likely cause: a schedule or a hook follows the loss of its own process: use step, which all share"
                    "; or the optimizer needs all weights: use --config_file accelerate_configs/ddp.yaml"
                )
        bits = group.all_gather({key: int(own[key[0]]) for keys in self.shared.values() for key in keys})
        for key in dict.fromkeys(key for own in bits for key in own):
            first, *others = [number for number, own in enumerate(bits) if key in own]
            for other in [number for number in others if bits[number][key] != bits[first][key]]:
                values = group.all_gather(local(tensors[key[0]]).detach().cpu() if rank in (first, other) else None)
                if not (size := relative_distance(values[other], values[first])) <= ROUNDING:
                    return (
                        f"process {other} holds a different {key[0]} than process {first}, by {size:.1e} of its size; "
                        f"they agreed after step {self.agreed}. Likely cause: {CAUSES[key[0] in self._buffers]}"
                    )
        self._compares = False
        self._accelerator.print(
            "the processes round differently, for example on different processors: the run no longer compares weights"
        )
        return None


def sum_of_sums(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """A number below 2^52 that changes with one of these numbers, int64, 0-dim."""
    together = torch.stack([torch.zeros((), dtype=torch.int64, device=device), *(each.to(device) for each in sums)])
    return (together * torch.arange(1, 2 * len(together), 2, device=device)).sum() & EXACT


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, added up as int64, 0-dim. A sum of whole numbers does not depend on the order."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # a view as int64 starts at a multiple of 8 bytes
    end = len(flat) // 8 * 8
    total = flat[:end].view(torch.int64).sum()
    return total if end == len(flat) else total + pad(flat[end:], (0, end + 8 - len(flat))).view(torch.int64)[0]
