"""Parts of tensors: what a process holds of a tensor that several processes share, and how it is read back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:  # its import takes 0.7 s
    from torch.distributed.tensor import DTensor


class TensorReader(Protocol):
    """Reads tensors, or ranges of them, from a checkpoint.

    Attributes:
        tensors: {name: what is known of it, with its "shape"}.
    """

    tensors: dict[str, dict[str, Any]]

    def tensor(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """A tensor on the CPU, or the range of `sizes` from `offsets`."""


@dataclass(frozen=True)
class Part:
    """What this process holds of a tensor.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        offsets: where the part begins, for each dimension.
        sizes: of the part.
        get: gives it. All processes call it for all their parts, in the same order.
        of_first: it may differ between those that hold it; the first of them counts.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    get: Callable[[], Tensor]
    of_first: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor, of_first: bool = False) -> "Part":
        """All of a tensor."""
        return cls.gathered(name, tuple(tensor.shape), lambda: tensor, of_first)

    @classmethod
    def gathered(cls, name: str, shape: tuple[int, ...], get: Callable[[], Tensor], of_first: bool = False) -> "Part":
        """All of a tensor that only `get` brings together."""
        return cls(name, shape, (0,) * len(shape), shape, get, of_first)


def is_divided(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def parts_of(name: str, tensor: Tensor, of_first: bool = False) -> Iterator[Part]:
    """The part that this process holds of a tensor, whole or divided; none where it holds nothing."""
    if not is_divided(tensor):
        yield Part.whole(name, tensor, of_first)
        return
    local, (offsets, sizes) = tensor.to_local(), _range(tensor)
    assert tuple(local.shape) == sizes, (name, local.shape, sizes)
    if local.numel() or not tensor.numel():
        yield Part(name, tuple(tensor.shape), offsets, sizes, lambda: local)


def _range(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of what this process holds of a DTensor."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    mesh = tensor.device_mesh
    # From the last dimension of the mesh to the first, as tensor parallelism divided before FSDP2 did;
    # torch's own functions do not know that order where both divided one dimension.
    for dimension in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[dimension]
        if placement.is_shard() or hasattr(placement, "split_factor"):
            along, index = placement.dim, mesh.get_local_rank(dimension)
            chunk = -(-sizes[along] // mesh.size(dimension))
            start = min(index * chunk, sizes[along])
            offsets[along] += start
            sizes[along] = min(chunk, sizes[along] - start)
    return tuple(offsets), tuple(sizes)


def placed_like(weight: Tensor, reader: TensorReader, name: str) -> Tensor:
    """What this process holds of a tensor on the disk, if it is divided as `weight` is."""
    shape = tuple(reader.tensors[name]["shape"])
    if shape != tuple(weight.shape):
        return reader.tensor(name).to(weight.device)
    if not is_divided(weight):
        value = reader.tensor(name)
        return torch.empty_like(weight, dtype=value.dtype).copy_(value)  # fused kernels want its memory format, too
    from torch.distributed.tensor import DTensor

    local = reader.tensor(name, *_range(weight)).to(weight.device)
    strides = weight.stride()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=strides
    )
