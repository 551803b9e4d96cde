"""Parts of tensors: the range of a sharded tensor that a process holds, and how to read it back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # the import takes 0.7 s
    from torch.distributed.tensor import DTensor


class TensorReader(Protocol):
    """Reads tensors, or ranges of them, from a checkpoint or from the files of a pretrained model.

    Attributes:
        tensors: {name: description of the tensor, with its "shape"}.
    """

    tensors: dict[str, dict[str, Any]]

    def tensor(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Reads a tensor, or its range of `sizes` from `offsets`, onto the CPU."""


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this process holds.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        offsets: start of the part in each dimension.
        sizes: of the part.
        get: returns the part. It may be a collective: all processes call it for all parts, in the same order.
        of_first: the part may differ between processes that hold it; the first of them saves it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    get: Callable[[], Tensor]
    of_first: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor, of_first: bool = False) -> "Part":
        """A part that is the whole tensor."""
        return cls.gathered(name, tuple(tensor.shape), lambda: tensor, of_first)

    @classmethod
    def gathered(cls, name: str, shape: tuple[int, ...], get: Callable[[], Tensor], of_first: bool = False) -> "Part":
        """A part that is the whole tensor; `get` gathers it."""
        return cls(name, shape, (0,) * len(shape), shape, get, of_first)


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """{name: parameter or buffer} that checkpoints and exports hold: all, or the trained ones of a module with a
    `peft_adapter`, whose other weights are those of a model that exists elsewhere."""
    state = module.state_dict(keep_vars=True)
    if getattr(module, "peft_adapter", None) is None:
        return state
    return {name: tensor for name, tensor in state.items() if tensor.requires_grad}


def is_divided(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether the tensor is a DTensor."""
    return hasattr(tensor, "placements")


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors grouped by device mesh; plain tensors are one group."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if is_divided(tensor) else tensor


def parts_of(name: str, tensor: Tensor, of_first: bool = False) -> Iterator[Part]:
    """This process's part of a tensor, whole or sharded; nothing if its shard is empty."""
    if not is_divided(tensor):
        yield Part.whole(name, tensor, of_first)
        return
    local, (offsets, sizes) = tensor.to_local(), _range(tensor)
    assert tuple(local.shape) == sizes, (name, local.shape, sizes)
    if local.numel() or not tensor.numel():
        yield Part(name, tuple(tensor.shape), offsets, sizes, lambda: local)


def _range(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this process's shard of a DTensor."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    mesh = tensor.device_mesh
    # From the last mesh dimension to the first: tensor parallelism sharded before FSDP2 did. torch's own
    # functions do not use that order if both sharded the same tensor dimension.
    for dimension in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[dimension]
        if placement.is_shard() or hasattr(placement, "split_factor"):
            along, index = placement.dim, mesh.get_local_rank(dimension)
            chunk = -(-sizes[along] // mesh.size(dimension))
            start = min(index * chunk, sizes[along])
            offsets[along] += start
            sizes[along] = min(chunk, sizes[along] - start)
    return tuple(offsets), tuple(sizes)


def placed_like(
    weight: Tensor,
    reader: TensorReader,
    name: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reads this process's part of a saved tensor, sharded as `weight` is. A tensor of another shape is read whole.

    Args:
        weight: that the part belongs to, or whose state it is.
        reader: of the saved tensor.
        name: of the saved tensor.
        device: if not that of `weight`.
        dtype: if not the saved one.
    """
    shape, device = tuple(reader.tensors[name]["shape"]), device or weight.device
    if shape != tuple(weight.shape):
        return reader.tensor(name).to(device)
    if not is_divided(weight):
        value = reader.tensor(name)
        if dtype is None and value.device == torch.device(device) and value.stride() == weight.stride():
            return value
        # Fused kernels need the memory format of the weight.
        return torch.empty_like(weight, dtype=dtype or value.dtype, device=device).copy_(value)
    from torch.distributed.tensor import DTensor

    local = reader.tensor(name, *_range(weight)).to(device, dtype, copy=dtype is not None)  # not a map of the file
    strides = weight.stride()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=strides
    )
