"""Shards: the range of a tensor that a process has, and how to read it back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeGuard
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..errors import UsageError
from ..norms import norm_of


class TensorReader(Protocol):
    """Reads tensors, or ranges of them, from a checkpoint or from the files of a pretrained model."""

    tensors: dict[str, dict[str, Any]]  # {name: description of the tensor, with its "shape"}

    def tensor(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Reads a tensor, or its range of `sizes` from `offsets`, onto the CPU."""


@dataclass(frozen=True)
class Shard:
    """The range of a tensor that this process holds: all of it, or a part."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # start of the shard in each dimension
    sizes: tuple[int, ...]  # of the shard
    get: Callable[[], Tensor]  # may be a collective: all processes call it for all shards, in the same order
    # Ranks of the processes that may write it: all that hold it, or only the first if their values may differ.
    # These processes all hold the same shards with these writers.
    writers: Sequence[int]

    @classmethod
    def whole(cls, name: str, tensor: Tensor, writers: Sequence[int]) -> "Shard":
        return cls.gathered(name, tuple(tensor.shape), lambda: tensor, writers)

    @classmethod
    def gathered(cls, name: str, shape: tuple[int, ...], get: Callable[[], Tensor], writers: Sequence[int]) -> "Shard":
        """A shard that is the whole tensor; `get` gathers it."""
        return cls(name, shape, (0,) * len(shape), shape, get, writers)


def checkpoint_tensors(module: nn.Module) -> dict[str, Tensor]:
    """{name: parameter or buffer} that checkpoints and exports hold: all, or the trained ones and the adapters, even
    frozen ones, of a module with a `peft_adapter`, whose other weights exist elsewhere."""
    with _without_hooks(module, "_state_dict_hooks"):
        state = module.state_dict(keep_vars=True)
    for name in [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise UsageError(f"{name} in the model's state_dict is not a tensor: use a buffer, not get_extra_state")
    if getattr(module, "peft_adapter", None) is None:
        return state
    return {name: tensor for name, tensor in state.items() if tensor.requires_grad or ".lora_" in name}


def load_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Loads some of what `checkpoint_tensors` returned."""
    with _without_hooks(module, "_load_state_dict_pre_hooks"):
        module.load_state_dict(tensors, strict=False)


@contextmanager
def _without_hooks(module: nn.Module, kind: str) -> Iterator[None]:
    """Without hooks of a kind in the `with` block: the recipe's may rename or convert what a user saves and loads."""
    with ExitStack() as stack:
        for hooks in (getattr(each, kind) for each in module.modules()):
            if hooks:
                stack.enter_context(patch.dict(hooks, clear=True))
        yield


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if is_divided(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the shards of all processes that hold some. A collective."""
    if not is_divided(tensor):
        return tensor
    if (number := packs_of(tensor)) == 1:
        return tensor.full_tensor()
    # Torch 2.11 does not gather those.
    held, dim = local(tensor).detach().contiguous(), tensor.placements[0].dim  # type: ignore[attr-defined]
    shares = [torch.empty_like(held) for _ in range(tensor.device_mesh.size())]
    dist.all_gather(shares, held, tensor.device_mesh.get_group())
    return torch.cat([part for parts in zip(*(each.chunk(number, dim) for each in shares)) for part in parts], dim)


def norm_over_processes(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all elements of tensors, some of them DTensors: 0-dim, the same in all processes."""
    if not any(map(is_divided, tensors)):
        return norm_of(tensors)

    groups: dict[Any, list[Tensor]] = {}  # {(mesh, the placement of a sum over shards): shards}
    for tensor in tensors:
        key: Any = None
        if is_divided(tensor):
            key = tensor.device_mesh, tuple(Replicate() if along is None else Partial() for along in _place(tensor)[0])
        groups.setdefault(key, []).append(tensor)
    norms = []
    for key, group in groups.items():
        norm = norm_of([local(tensor) for tensor in group])
        if key is not None:
            norm = DTensor.from_local(norm.double().square(), *key, run_check=False).full_tensor().sqrt().float()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def shards_of(name: str, tensor: Tensor, everybody: Sequence[int], of_first: bool = False) -> Iterator[Shard]:
    """This process's shard of a tensor, whole or divided; nothing if it is empty. `everybody`: ranks of the processes
    that hold the tensor, or shards of it; `of_first`: a shard may differ between processes; the first one writes it."""
    if packs_of(tensor) > 1:
        yield Shard.gathered(name, tuple(tensor.shape), lambda: whole(tensor), everybody)
        return
    held, (offsets, sizes), writers = local(tensor), range_of(tensor), everybody
    assert tuple(held.shape) == sizes, (name, held.shape, sizes)
    if is_divided(tensor):
        writers = holders(_ranks(tensor.device_mesh), *_place(tensor), len(everybody))
    if held.numel() or not tensor.numel():
        yield Shard(name, tuple(tensor.shape), offsets, sizes, lambda: held, writers[:1] if of_first else writers)


def packs_of(tensor: Tensor) -> int:
    """Into how many equal parts a weight is divided first: 1, except for joint queries, keys, values under TP alone."""
    if not is_divided(tensor) or len(tensor.placements) > 1:
        return 1
    return getattr(tensor.placements[0], "split_factor", 1)


def range_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this process's shard of a tensor; of a plain tensor, all of it."""
    if not is_divided(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    return shard_range(tensor.shape, tensor.device_mesh.shape, *_place(tensor))


@lru_cache(maxsize=8)
def _ranks(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh; torch makes a new tensor each time."""
    return mesh.mesh


def _place(tensor: DTensor) -> tuple[list[int | None], Sequence[int]]:
    """(for each dimension of the mesh the tensor's dimension that it divides, or None; this process's coordinate)."""
    placements: Sequence[Any] = tensor.placements
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return [each.dim if each.is_shard() or hasattr(each, "split_factor") else None for each in placements], coordinate


def shard_range(
    shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[int | None], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of the shard of a tensor at a coordinate of a mesh of these sizes; `cuts` as in `_place`."""
    offsets, sizes = [0] * len(shape), list(shape)
    # From the last mesh dimension to the first: tensor parallelism sharded before FSDP2 did. torch's own
    # functions do not use that order if both sharded the same tensor dimension.
    for along, number, index in reversed([*zip(cuts, mesh, coordinate)]):
        if along is not None:
            chunk = -(-sizes[along] // number)
            start = min(index * chunk, sizes[along])
            offsets[along] += start
            sizes[along] = min(chunk, sizes[along] - start)
    return tuple(offsets), tuple(sizes)


def holders(
    ranks: Tensor, cuts: Sequence[int | None], coordinate: Sequence[int], num_processes: int
) -> tuple[int, ...]:
    """Ranks of the processes that hold the same shard as the process at a coordinate of a mesh, in increasing order.
    `ranks`: of the mesh, int, of its shape; `cuts`: as in `_place`; `num_processes`: of the run. If the mesh has fewer,
    the tensor is repeated by tensor parallelism, whose processes have consecutive ranks."""
    same = ranks[tuple(slice(None) if along is None else index for along, index in zip(cuts, coordinate))]
    repeats = num_processes // ranks.numel()
    return tuple(sorted(rank - rank % repeats + other for rank in same.flatten().tolist() for other in range(repeats)))


def read_like(
    weight: Tensor,
    reader: TensorReader,
    name: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reads this process's shard of a saved tensor, divided like the weight that it is, or whose state it is. A
    tensor of another shape is read whole. `device`: if not the weight's; `dtype`: if not the saved one."""
    shape, device = tuple(reader.tensors[name]["shape"]), device or weight.device
    if shape != tuple(weight.shape):
        return reader.tensor(name).to(device)
    if not is_divided(weight):
        value = reader.tensor(name)
        if dtype is None and value.device == torch.device(device) and value.stride() == weight.stride():
            return value
        # Fused kernels need the memory format of the weight.
        return torch.empty_like(weight, dtype=dtype or value.dtype, device=device).copy_(value)
    if (packs := packs_of(weight)) == 1:
        read = reader.tensor(name, *range_of(weight))
    else:
        dim, index = weight.placements[0].dim, weight.device_mesh.get_local_rank()  # type: ignore[attr-defined]
        shares = [pack.chunk(weight.device_mesh.size(), dim)[index] for pack in reader.tensor(name).chunk(packs, dim)]
        read = torch.cat(shares, dim)
    local = read.to(device, dtype, copy=dtype is not None)  # not a map of the file
    mesh, shape, strides = weight.device_mesh, weight.shape, weight.stride()
    return DTensor.from_local(local, mesh, weight.placements, run_check=False, shape=shape, stride=strides)
