"""How a process computes its share of a module, in each style of a plan.

A divided weight is a DTensor, which FSDP2 and checkpoints know. The pass works on plain tensors, such as this process's
shard of it: all collectives are in this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from ..weights.shards import local
from .tensor_plan import ENDS, EXPERTS, NORM_OF_HEADS, NUMBER, SHARED_KEYS, dims_of, is_conv1d

COLLECTIVES = torch.ops._c10d_functional
Change = Callable[[Tensor], Tensor]


class Mirrored(torch.autograd.Function):
    """Does one thing in the forward pass and another in the backward pass. Each is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, there: Change, back: Change) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Mirrored.apply(gradient, ctx.back, ctx.there), None, None


def gather(values: Tensor, size: int, group: str) -> Tensor:
    """The values of the processes of a group, one after the other in dimension 0."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(values.contiguous(), size, group))


def sum_scattered(values: Tensor, size: int, group: str) -> Tensor:
    """The sum over the processes of a group; each process gets its part of dimension 0."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.reduce_scatter_tensor(values.contiguous(), "sum", size, group))


class TensorGroup:
    """The processes that share each layer. Between layers a value is whole, and the same in all of them."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()
        self._name = mesh.get_group().group_name
        self._last: tuple[Tensor, int, Tensor] | None = None

    def __deepcopy__(self, memo: object) -> "TensorGroup":
        return self  # a copy of a divided module has the same processes

    @staticmethod
    def keep(value: Tensor) -> Tensor:
        return value

    def copy(self, value: Tensor) -> Tensor:
        """A whole value; each process has a part of its gradient."""
        return Mirrored.apply(value, self.keep, self._sum)

    def copy_once(self, value: Tensor) -> Tensor:
        """Like `copy`. Layers that get the same value one after the other, such as queries, keys and values, get the
        same copy: the parts of its gradient are summed once."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if self._last is None or self._last[0] is not value or self._last[1] != value._version:
            self._last = value, value._version, self.copy(value)
        return self._last[2]

    def sum(self, part: Tensor) -> Tensor:
        self._last = None  # frees its memory
        return Mirrored.apply(part, self._sum, self.keep)

    def gather(self, part: Tensor) -> Tensor:
        """All parts, side by side in the last dimension."""
        self._last = None
        return Mirrored.apply(part, self._gather, self._chunk)

    def split(self, value: Tensor) -> Tensor:
        """This process's part of the last dimension."""
        return Mirrored.apply(value, self._chunk, self._gather)

    def _sum(self, part: Tensor) -> Tensor:
        return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(part.contiguous(), "sum", self._name))

    def _gather(self, part: Tensor) -> Tensor:
        return torch.cat(gather(part[None], self.size, self._name).unbind(), -1)

    def _chunk(self, value: Tensor) -> Tensor:
        return value.chunk(self.size, -1)[self.rank].contiguous()


def divide(module: Any, style: str, group: TensorGroup, attribute: str = "") -> None:
    """Divides the weights of a module, which then computes this process's share. `style`: of `shipped_plan` or
    `derive`; `attribute`: the number that the style `NUMBER` divides."""
    if style == NUMBER:
        setattr(module, attribute, getattr(module, attribute) // group.size)
        return
    kind, _, number = style.rpartition("_")
    if kind == SHARED_KEYS:
        end = int(number)  # the last features, which each process uses for its own heads
        module.register_forward_hook(lambda _, args, out: torch.cat([out[..., :-end], group.copy(out[..., -end:])], -1))
        return
    own, packs = module.forward, int(number) if number.isdigit() else 1
    if style == NORM_OF_HEADS:  # the weight is whole, and its gradient the sum over the heads
        module.forward = partial(_forward, module, own, weights=group.copy)
        return
    if style == EXPERTS:  # both halves of the first weight, gate and up, are colwise
        divide_weight(module, "gate_up_proj", group.mesh, [_StridedShard(1, split_factor=2)])
        divide_weight(module, "down_proj", group.mesh, [Shard(2)])
        module.forward = partial(_forward, module, own, given=group.copy, returned=group.sum)
        return
    by_inputs = "rowwise" in style
    for key, weight in list(module.named_parameters()):
        if weight.ndim > 1 or not by_inputs:
            dim = dims_of(module)[by_inputs] if weight.ndim > 1 else 0
            placement = Shard(dim) if packs == 1 else _StridedShard(dim, split_factor=packs)
            divide_weight(module, key, group.mesh, [placement])
    given, returned = (getattr(group, name) for name in ENDS["colwise" if packs > 1 else style])
    if is_conv1d(module):
        own = partial(_transposed, module)  # its own has the whole width
    elif isinstance(module, nn.Embedding) and by_inputs:
        num_rows, padding = module.num_embeddings // group.size, module.padding_idx
        own, given = partial(_look_up, own, num_rows * group.rank, num_rows), group.keep
        if padding is not None:  # one process has its row
            module.padding_idx = padding % num_rows if padding // num_rows == group.rank else None
    module.forward = partial(_forward, module, own, given=given, returned=returned, adds_bias=by_inputs)


def divide_weight(module: nn.Module, key: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Makes a weight of a module a DTensor."""
    weight = module.get_parameter(key)
    module.register_parameter(key, nn.Parameter(distribute_tensor(weight, mesh, placements), weight.requires_grad))


@contextmanager
def other_weights(module: nn.Module, change: Change, without: str = "") -> Iterator[None]:
    """Within the `with` block a module sees its weights as changed by `change`, and one of them as None."""
    held = dict(module._parameters)
    seen: Any = {key: None if weight is None or key == without else change(weight) for key, weight in held.items()}
    module._parameters.update(seen)
    try:
        yield
    finally:
        module._parameters.update(held)


def _forward(
    module: nn.Module,
    own: Callable[..., Tensor],
    *args: Any,
    given: Change = TensorGroup.keep,
    returned: Change = TensorGroup.keep,
    weights: Change = local,
    adds_bias: bool = False,
    **named: Any,
) -> Tensor:
    """A module's pass with changed inputs, outputs and weights. `adds_bias`: adds the bias to the outputs.

    A partial of it becomes `forward`. A deep copy of the model would share a function within a function, and so compute
    with the weights of the original.
    """
    with other_weights(module, weights, without="bias" if adds_bias else ""):
        output = returned(own(*map(given, (*args, *named.values()))))
    bias = module._parameters.get("bias") if adds_bias else None
    return output if bias is None else output + bias


def _transposed(module: Any, value: Tensor) -> Tensor:
    return F.linear(value, module.weight.T, module.bias)


def _look_up(own: Change, first: int, num_rows: int, ids: Tensor) -> Tensor:
    """The pass of an embedding where each process has some of the rows: zeros for the others."""
    is_here = (ids >= first) & (ids < first + num_rows)
    return own((ids - first).where(is_here, 0)).masked_fill(~is_here.unsqueeze(-1), 0)
