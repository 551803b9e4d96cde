"""Sums of each module's output and gradient in a step."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..parallel.stages import is_absent
from ..step.engine import Engine
from ..weights.shards import is_divided, local

MOST_BLOCKS = 16  # of a sample's tensor, before a config divides it
# (name of the module, number of its call in a forward pass, number of the tensor that it returns)
Place = tuple[str, int, int]
PlaceInRow = tuple[int, Place]  # (row of the micro-batch, place)
Sums = dict[PlaceInRow, Tensor]  # of shape (samples, blocks, ...)


@dataclass
class ModuleTrace:
    """The outputs of the modules in a step, in order.

    The tensor of a sample is cut into blocks, and each block is kept as the sum of its elements with random signs: this
    gives the distance of two tensors within 20 %. All blocks of a tensor use the same signs, so that the blocks of a
    process that holds some of the tokens, heads or features are also blocks of the whole tensor.
    """

    parts: int = 0  # how many processes may share a tensor; 0 in processes that do not choose the sizes of blocks
    block_sizes: dict[PlaceInRow, tuple[int, ...]] = field(default_factory=dict)  # {key: sizes of a block}
    forward: Sums = field(default_factory=dict)  # of the tensors
    backward: Sums = field(default_factory=dict)  # of their gradients, in the order in which they arrive
    classes: dict[str, str] = field(default_factory=dict)  # {module: name of its class}
    followers: dict[str, dict[str, None]] = field(default_factory=dict)  # {module: modules that take its output}
    is_low: bool = False  # whether a module computed with fewer bits than float32
    num_calls: Counter[tuple[int, str]] = field(default_factory=Counter)  # of a module in a row

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Records the passes that have a gradient, in the step that the engine takes in the `with` block. Leaves out
        modules that accept no hooks, such as scripted modules, and modules that are partly in another stage."""
        with ExitStack() as hooks:
            for name, module in engine.running_modules():
                if not isinstance(module, torch.jit.ScriptModule) and not any(map(is_absent, module.modules())):
                    before, after = partial(self._before, name), partial(self._after, engine, name)
                    self.classes[name] = type(module).__name__
                    hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(after))
            yield

    def on_cpu(self) -> "ModuleTrace":
        """The same trace, to compare with other processes' traces."""
        forward, backward = ({key: sums.cpu() for key, sums in each.items()} for each in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def _before(self, name: str, module: nn.Module, args: Any, named: Any) -> None:
        for tensor in tensors_in((args, named)):
            if (giver := getattr(tensor, "_module", None)) is not None:
                self.followers.setdefault(giver, {})[name] = None

    def _after(self, engine: Engine, name: str, module: nn.Module, args: Any, output: Any) -> None:
        row, size = engine.row, engine.plan.micro_batch_size
        is_again = torch._C._current_graph_task_id() != -1  # activation checkpointing, in the backward pass
        if row is None or is_again:
            return
        call = self.num_calls[row, name]
        self.num_calls[row, name] += 1
        if not torch.is_grad_enabled():
            return
        for index, tensor in enumerate(tensors_in(output)):
            key = (row, (name, call, index))
            self.is_low = self.is_low or torch.finfo(tensor.dtype).bits < 32
            self._note(size, self.forward, key, tensor)
            tensor._module = name  # type: ignore[attr-defined]
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, size, self.backward, key))

    @torch.no_grad()
    def _note(self, size: int, sums: Sums, key: PlaceInRow, tensor: Tensor | None) -> None:
        if tensor is None or (own := own_values(tensor)) is None:  # a function may give its input no gradient
            return
        values = by_sample(own, size)
        if self.parts:
            self.block_sizes[key] = sizes_of_blocks(values.shape[1:], self.parts)
        sizes = self.block_sizes.get(key)
        if sizes is not None and (found := block_sums(values, sizes)) is not None:
            sums[key] = found.detach().clone()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a module's input or output."""
    tensors = (each for each in tree_leaves(value) if isinstance(each, Tensor))
    return (each for each in tensors if each.is_floating_point() and each.numel())


def own_values(tensor: Tensor) -> Tensor | None:
    """The plain tensor that this process holds; None if its values are not real ones, as under `torch.func.vmap`."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if is_wrapped or (is_divided(tensor) and any(place.is_partial() for place in tensor.placements)):
        return None
    return local(tensor)


def by_sample(tensor: Tensor, samples: int) -> Tensor:
    """The tensor with the samples as first dimension: (samples, ...). Without such a dimension, it is one sample."""
    if not tensor.ndim or tensor.shape[0] % samples:
        return tensor[None]
    return tensor if tensor.shape[0] == samples else tensor.unflatten(0, (samples, -1))


def sizes_of_blocks(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The sizes of the blocks of a tensor of this shape. Cuts the first and the last dimension, tokens and features,
    most. Cuts each dimension so that `parts`, the number of processes that share a model, may divide it."""
    most = MOST_BLOCKS if len(shape) == 1 else math.isqrt(MOST_BLOCKS)
    sizes = []
    for index, size in enumerate(shape):
        shared = math.gcd(size, parts)
        more = most // shared if index in (0, len(shape) - 1) else 1
        sizes.append(size // (shared * max(n for n in range(1, max(more, 1) + 1) if size // shared % n == 0)))
    return tuple(sizes)


def block_sums(values: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
    """The sum of each block, with random signs: of shape (samples, blocks, ...); None if the tensor does not consist of
    such blocks. `values`: of shape (samples, ...); `sizes`: of a block, in the dimensions after the first."""
    if values.ndim != len(sizes) + 1 or any(length % size for length, size in zip(values.shape[1:], sizes)):
        return None
    values = values if values.dtype == torch.float64 else values.float()
    for dim, size in reversed(list(enumerate(sizes, start=1))):
        blocks = values.unflatten(dim, (-1, size)).movedim(dim + 1, -1)
        values = (blocks * _signs(size, dim, values.device)).sum(-1)  # a product of matrices might round to 16 bits
    return values


@lru_cache(64)
def _signs(length: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(2, (length,), generator=generator) * 2 - 1).to(device, torch.float32)


def relative_distances(own: Tensor, whole: Tensor) -> Tensor | None:
    """The distance of each sample from the nearest part of the whole, relative to the norm of that part, or to a larger
    mean of all samples: float64 of shape (samples,). None if `own` is not a part of the whole."""
    if own.ndim != whole.ndim or len(own) != len(whole):
        return None
    lengths = list(zip(own.shape[1:], whole.shape[1:]))
    if any(part > length or length % part for part, length in lengths):
        return None
    own, found = own.double().reshape(len(own), -1), []
    for starts in product(*(range(0, length, part) for part, length in lengths)):
        part = whole[(slice(None), *(slice(start, start + size) for start, (size, _) in zip(starts, lengths)))]
        part = part.double().reshape(own.shape)
        norms = part.norm(dim=1)
        gaps = (own - part).norm(dim=1) / norms.clamp(min=max(float(norms.mean()), 1e-30))
        found.append(gaps.nan_to_num(0.0, math.inf))
    return min(found, key=lambda gaps: float(gaps.sum()))
