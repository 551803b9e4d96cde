"""Stand-ins for processes and memory: a process group of N in one process, and tensors without data."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _meta_registrations, device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_recipes.common.parallel import expert, pipeline
from accelerate_recipes.common.step import same_path
from accelerate_recipes.common.weights.on_disk import LazyParameter

BUCKET = 25 * 2**20  # bytes; DDP's default


def weights_on_meta(size: Path) -> AbstractContextManager[Any]:
    """Parameters of modules that are built in the `with` block take no memory and have no values, like parameters that
    are still on disk. A file always has the number of bytes that they would take."""
    register = nn.Module.register_parameter
    moved: Any = WeakIdKeyDictionary()  # a weight that two modules share stays one weight
    num_bytes = 0

    def registered(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal num_bytes
        if weight is not None and not weight.is_meta:
            if weight not in moved:
                moved[weight] = LazyParameter(weight.detach().to("meta"), weight.requires_grad)
                num_bytes += weight.nbytes
                size.write_text(str(num_bytes))
            weight = moved[weight]
        register(module, name, weight)

    return patch.object(nn.Module, "register_parameter", registered)


@contextmanager
def processes(number: int, rank: int) -> Iterator[None]:
    """In the block, process groups have `number` processes; this is `rank`. No model is moved, and nothing is sent."""
    join = dist.init_process_group

    def joined(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            join("fake", store=FakeStore(), rank=rank, world_size=number)

    with_ranks: Any = _disable_current_modes()  # a decorator: a mesh reads its ranks
    make_mesh = with_ranks(device_mesh.init_device_mesh)
    with ExitStack() as stack:
        for owner, name, value in (
            (dist, "init_process_group", joined),
            (dist, "all_gather_object", lambda found, own, _: found.__setitem__(slice(None), [own] * len(found))),
            (device_mesh, "init_device_mesh", make_mesh),
            (_fsdp_init, "init_device_mesh", make_mesh),
            (device_mesh.DeviceMesh, "__init__", with_ranks(device_mesh.DeviceMesh.__init__)),
            (_fsdp_param, "_chunk_with_empty", _Chunks),
            (_meta_registrations, "generate_unique_id", count(1).__next__),  # torch's function draws a random number
            (nn.parallel, "DistributedDataParallel", Replica),
            (expert.ExpertGroup, "_longest", lambda _, number: number),  # all have as many tokens as this process
            (same_path.SamePath, "_meet", lambda *_: True),  # all do what this process does
            (pipeline, "restore_generators", nullcontext),  # states of generators have values
            (nn.Module, "to", lambda module, *_, **__: module),
            (Tensor, "pin_memory", lambda tensor, *_, **__: tensor),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if masks := sys.modules.get("transformers.masking_utils"):  # it mistakes tensors without data for tracing
            stack.enter_context(patch.object(masks, "is_tracing", lambda *_: False))
        if experts := sys.modules.get("transformers.integrations.moe"):  # its operation for tracing accepts any type
            stack.enter_context(patch.object(experts, "_can_use_grouped_mm", lambda *_: False))
        if number > 1:
            joined()
        yield


class _Chunks:
    """The shards of a weight, made on request: FSDP2 uses two, but makes all (one minute for 1,024 processes)."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self.tensor, self.dim, self.size = tensor, dim, -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        if (start := index * self.size) >= self.tensor.shape[self.dim]:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.size, self.tensor.shape[self.dim] - start))


class Replica(DistributedDataParallel):
    """Holds and sends as much as DDP. DDP's own C++ code reads addresses, and fake tensors have none."""

    def __init__(self, module: nn.Module, *_: Any, find_unused_parameters: bool = False, **__: Any):
        nn.Module.__init__(self)
        self.module, self.sends, self.find_unused_parameters = module, True, find_unused_parameters
        self._buckets: list[list[nn.Parameter]] = []
        size = BUCKET
        # About the order in which gradients are ready.
        for weight in reversed([weight for weight in module.parameters() if weight.requires_grad]):
            if size >= BUCKET:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(weight)
            size += weight.nbytes
        self._missing = [len(bucket) for bucket in self._buckets]
        self._flat = [torch.empty(sum(weight.numel() for weight in bucket)) for bucket in self._buckets]
        for index, (bucket, flat) in enumerate(zip(self._buckets, self._flat)):
            for weight, view in zip(bucket, flat.split([weight.numel() for weight in bucket])):
                weight.register_post_accumulate_grad_hook(partial(self._receive, index, view.view_as(weight)))

    def _receive(self, index: int, view: Tensor, weight: Any) -> None:
        weight.grad = view.copy_(weight.grad)
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._missing[index] = len(self._buckets[index])
            if self.sends:
                dist.all_reduce(self._flat[index], async_op=True)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.module(*args, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sends = False
        yield
        self.sends = True


def make_fake(model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype | None) -> None:
    """Gives model and optimizer weights without data, in a FakeTensorMode; floating-point ones of `dtype`, if given."""
    made: dict[int, Any] = {}
    owners: list[Any] = []  # kept alive, because Python reuses the id of a freed tensor

    def fake(tensor: Any) -> Any:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
            value: Any = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, tensor.requires_grad)
            made[id(tensor)] = made[id(value)] = value
            owners.extend([tensor, value])
        return made[id(tensor)]

    for module in model.modules():
        for own in (module._parameters, module._buffers):
            own.update({name: fake(tensor) for name, tensor in own.items() if tensor is not None})
    for group in optimizer.param_groups if optimizer else ():
        group["params"] = [fake(weight) for weight in group["params"]]
