"""Records what a training step does on fake tensors: bytes in memory, seconds of its operations, collectives."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from accelerate_recipes.plan.estimates import Collective, Event, Group
from accelerate_recipes.plan.hardware import Gpu

# {part of the name of torch's operation: (collective, whether it runs beside the computation)}. Collectives of
# `torch.distributed` do; the functional collectives of tensor and sequence parallelism do not.
COLLECTIVES = {
    "allreduce_": ("all_reduce", True),
    "_allgather_base_": ("all_gather", True),
    "allgather_": ("all_gather", True),
    "_reduce_scatter_base_": ("reduce_scatter", True),
    "send": ("send", False),
    "all_reduce": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", False),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Tracker(TorchDispatchMode):
    """Active in a `with` block. A program that reads a value gets 1."""

    def __init__(self, gpu: Gpu, tf32: bool, experts: int = 1):
        super().__init__()
        self.held = self.peak = 0  # bytes of all live tensors that were made in the block, and the most in `track`
        self.events: list[Event] = []  # in the order of the program
        self.flops, self.num_draws = 0.0, 0  # floating-point operations; operations that drew random numbers
        self._gpu, self._tf32, self._experts = gpu, tf32, experts
        self._sizes: dict[int, int] = {}  # {storage: its bytes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call operations on their local tensors, which come here again
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return {"float": 1.0, "bool": True}.get(str(args[0].dtype).removeprefix("torch.").rstrip("0123456789"), 1)
        if func is torch.ops.aten.equal.default:
            return True
        out = func(*args, **kwargs)
        # The kernel for attention on the CPU has the tag, and no dropout.
        self.num_draws += torch.Tag.nondeterministic_seeded in func.tags and func._overloadpacket is not ATTENTION
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args)
        else:
            self._operation(func, args, kwargs, out)
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._hold(value)
        return out

    def track(self, step: Callable[[], Any]) -> tuple[list[Event], int, float]:
        """(events, peak, floating-point operations) while `step` runs."""
        self.events, self.peak, self.flops = [], self.held, 0.0
        step()
        return self.events, self.peak, self.flops

    def track_freed_storages(self) -> AbstractContextManager[Any]:
        """Also records storages that are resized, as FSDP2 does to free gathered weights."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: Any, size: int) -> Any:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._add(size - self._sizes[storage._cdata])
                self._sizes[storage._cdata] = size
            return storage

        return patch.object(torch.UntypedStorage, "resize_", noted)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._add(self._sizes[key])
            weakref.finalize(storage, lambda: self._add(-self._sizes.pop(key, 0)))

    def _add(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.is_view or func.namespace == "prim":
            return
        flops = self._flops(func, args, kwargs, out)
        tensors = [value for value in tree_leaves((args, kwargs, out)) if isinstance(value, Tensor)]
        moved = sum({id(value): value.nbytes for value in tensors}.values())
        is_16 = any(value.dtype in (torch.bfloat16, torch.float16) for value in tensors)
        seconds = self._gpu.seconds(flops, moved, is_16, self._tf32)
        self.flops += flops
        if self.events and isinstance(self.events[-1], float):
            self.events[-1] += seconds
        else:
            self.events.append(seconds)

    def _flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        packet = func._overloadpacket
        if packet in (ATTENTION, ATTENTION_BACKWARD):  # torch does not count attention on the CPU
            is_backward = packet is ATTENTION_BACKWARD
            query, key = args[1:3] if is_backward else args[:2]
            place = 7 if is_backward else 4
            causal = kwargs.get("is_causal", len(args) > place and args[place])
            batch, heads, length, width = query.shape
            forward = 4.0 * batch * heads * length * key.shape[2] * width * (0.5 if causal else 1)
            return forward * 2.5 if is_backward else forward
        if func.namespace == "transformers" and packet.__name__.startswith("grouped_mm"):  # experts
            tokens, weight = args[:2]  # an expert-parallel process has the tokens of its group, and computes its share
            forward = 2.0 * len(tokens) / self._experts * weight.shape[1] * weight.shape[2]
            return forward * 2 if packet.__name__.endswith("backward") else forward
        return float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0.0

    def _collective(self, func: Any, args: Any) -> None:
        if (name := func._overloadpacket.__name__) not in COLLECTIVES:
            return
        collective, runs_beside = COLLECTIVES[name]
        sizes = [value.nbytes for value in tree_leaves(args) if isinstance(value, Tensor)]
        group = _group(args)
        size = max(sizes) * (group.size if name == "all_gather_into_tensor" else 1)
        if collective == "send":
            group = group._replace(size=2)
        if group.size > 1:
            self.events.append(Collective(collective, size, group, runs_beside))


def _group(args: Any) -> Group:
    """The group of a collective, from an argument that is an object or a name."""
    group: Any = dist.group.WORLD
    names = ("sum", "avg", "max", "min")  # of operations
    for value in args:
        if isinstance(value, str) and value not in names:
            group = dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
    ranks = dist.get_process_group_ranks(group)
    return Group(ranks[0], len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
