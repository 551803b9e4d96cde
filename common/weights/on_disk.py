"""Weights that stay on disk and on the meta device until each process reads its part."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import UsageError
from .shards import TensorReader, read_like

Origin = tuple[TensorReader, str]  # the reader of a weight, and its name there


class WeightFiles(Mapping[str, Tensor]):
    """The weights in safetensors files by name, each a map of its file; a `TensorReader`. `types`: of safetensors."""

    def __init__(self, paths: Iterable[str | Path]):
        files = [safe_open(path, "pt") for path in paths]
        self._file_of = {name: file for file in files for name in file.offset_keys()}
        self.tensors: dict[str, dict[str, Any]] = {
            name: {"shape": file.get_slice(name).get_shape()} for name, file in self._file_of.items()
        }
        self.types = {name: file.get_slice(name).get_dtype() for name, file in self._file_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def tensor(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        if not offsets or sizes is None:
            return self[name]
        return self._file_of[name].get_slice(name)[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]


class LazyParameter(nn.Parameter):
    """A weight on the meta device. It becomes an ordinary one, with its values, before the first operation that needs
    more than its shape and type, so that a model that is used before `fit`, or without it, works like any other."""

    origin: Any = None, ""  # where it is read from; nowhere for a plan, whose weights have no values

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for weight in tree_leaves((args, kwargs)) if function not in FACTS else ():
            if isinstance(weight, LazyParameter) and weight.origin[0] is not None:
                _swap(weight, _read(weight, weight.origin, "cpu"))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        self.detach()  # reads it
        return nn.Parameter.__deepcopy__(self, memo)


# These functions need no values. Any other function reads the weight early, which takes memory and changes no result.
READ = ["shape", "dtype", "ndim", "nbytes", "layout", "is_meta", "is_leaf", "requires_grad", "grad", "grad_fn"]
CALLED = ["size", "dim", "numel", "stride", "is_floating_point", "is_complex", "requires_grad_"]
FACTS = {
    *(getattr(Tensor, name).__get__ for name in READ),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(Tensor, name) for name in CALLED),
    torch.is_floating_point,
}


def leave_on_disk(weight: Tensor, reader: TensorReader, name: str) -> None:
    """Records where a parameter on the meta device is read from."""
    weight.__class__ = LazyParameter
    weight.origin = (reader, name)  # type: ignore[attr-defined]  # now it is one


def origin_of(weight: Tensor) -> Origin | None:
    """The source of a weight on disk; None if it is in memory."""
    return getattr(weight, "origin", None)


def on_disk(module: nn.Module) -> dict[str, Origin]:
    """{name: where it is read from} of the weights that are still on disk. Raises UsageError for one without values."""
    origins: dict[str, Origin] = {}
    for name, weight in module.state_dict(keep_vars=True).items():
        if weight.is_meta:
            if (origin := origin_of(weight)) is None:
                raise UsageError(f"{name} is on the meta device and has no values: build it on the CPU")
            origins[name] = origin
    return origins


def first_elements(tensor: Tensor) -> Tensor:
    """A tensor; for a weight on disk, up to 64 elements of its first row."""
    if (origin := origin_of(tensor)) is None:
        return tensor
    reader, name = origin
    return reader.tensor(name, [0] * tensor.ndim, [*[1] * (tensor.ndim - 1), min(64, *tensor.shape[-1:])])


@torch.no_grad()
def materialize(
    module: nn.Module, device: torch.device | str = "cpu", origins: dict[str, Origin] | None = None
) -> None:
    """Reads the weights that are still on disk onto a device: of each, the part that this process holds. The parameters
    of the module stay the same objects. `origins`: from `on_disk`, before the weights were divided."""
    origins = on_disk(module) if origins is None else origins
    for name, weight in module.state_dict(keep_vars=True).items():
        if weight.is_meta:  # not a tied weight that has been read under another name
            _swap(weight, _read(weight, origins[name], device))


@contextmanager
def materialized(module: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Fills the module after the `with` block, which divides it."""
    origins = on_disk(module)
    with torch._C.DisableTorchFunctionSubclass():
        yield
    materialize(module, device, origins)


def with_full_weights(module: nn.Module) -> AbstractContextManager[None]:
    """Holds the whole weights for the `with` block, mostly memory-mapped from the files: do not write into them."""
    return _lent(module, lambda weight, origin: origin[0].tensor(origin[1]).to(weight.dtype))


def with_random_weights(module: nn.Module) -> AbstractContextManager[None]:
    """Gives the weights that are on disk random values for the `with` block. The elements of a weight share memory."""
    generator = torch.Generator().manual_seed(0)

    def window(weight: Tensor, origin: Origin) -> Tensor:
        if weight.ndim < 2:
            return torch.ones(weight.shape, dtype=weight.dtype)
        is_stack = weight.ndim > 2  # such as experts, whose kernels need matrices without overlaps
        shape = weight.shape[-2:] if is_stack else (sum(weight.shape),)
        values = torch.randn(shape, generator=generator, dtype=weight.dtype) / weight.shape[-1] ** 0.5
        return values.expand(weight.shape) if is_stack else values.as_strided(weight.shape, [1, 1])

    return _lent(module, window)


def is_lent(tensor: Tensor) -> bool:
    """Whether a weight temporarily holds values that must not be changed."""
    return hasattr(tensor, "is_lent")


@contextmanager
def _lent(module: nn.Module, value: Callable[[Tensor, Origin], Tensor]) -> Iterator[None]:
    lent: list[tuple[Tensor, Tensor]] = []
    try:
        for weight in list(module.parameters()):
            if (origin := origin_of(weight)) is not None:
                lent.append((weight, _swap(weight, value(weight, origin))))
                weight.is_lent = True  # type: ignore[attr-defined]
        yield
    finally:
        for borrower, own in lent:
            own.requires_grad_(borrower.requires_grad)  # PEFT freezes weights in the block
            torch.utils.swap_tensors(borrower, own)


def _read(weight: Tensor, origin: Origin, device: torch.device | str) -> Tensor:
    reader, name = origin
    with torch._C.DisableTorchFunctionSubclass():
        return read_like(weight, reader, name, device, weight.dtype)


def _swap(weight: Tensor, value: Tensor) -> Tensor:
    """Gives a parameter the value, but keeps the object: optimizers, hooks and tied layers refer to it. Returns the old
    value. Torch cannot set `data` on another kind of device."""
    other: Tensor = nn.Parameter(value, requires_grad=weight.requires_grad)
    torch.utils.swap_tensors(weight, other)
    return other
