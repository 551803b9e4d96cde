"""Sequence parallelism: each process of a group holds a slice of the tokens of the same samples.

Attention needs all tokens: before it, the processes exchange tokens for heads, and after it heads for tokens (Jacobs et
al. 2023, DeepSpeed Ulysses). All other layers of a language model work on each token by itself.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from ..errors import UsageError
from ..plan import Plan
from .grid import Grid
from .strategy import Strategy


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a model that cannot divide samples, or not by this size. Tensor parallelism also divides the heads."""
    divider = divider_of(model, plan.layout.sp)
    if plan.layout.tp > 1:
        try:
            divider.check(plan.layout.sp * plan.layout.tp)
        except UsageError as error:
            raise UsageError(error.what, "use a smaller sp_size or tp_size in the config file") from None


class SequenceParallel(Strategy):
    name = "SP"
    axis = "sp"
    wraps = of_weights = False
    cause_at_once = (
        "a layer other than attention {draws}needs all tokens of a sample, as convolutions do: use --config_file "
        "accelerate_configs/fsdp2.yaml"
    )
    model_checks = (check_layers,)

    def divide(self, model: nn.Module, root: nn.Module, plan: Any, grid: Grid) -> None:
        divider_of(model, grid.layout.sp).divide(SequenceGroup(grid.mesh["sp"]))


class SequenceGroup:
    """The processes that share the tokens of the same samples: each holds the slice of its rank among them."""

    def __init__(self, mesh: Any):
        self.size, self.rank, self._group = mesh.size(), mesh.get_local_rank(), mesh.get_group()

    def padded_length(self, length: int) -> int:
        """The length of all slices together: `length`, rounded up to a multiple of the size."""
        return -(-length // self.size) * self.size

    def slice(self, tokens: Tensor, padding: int) -> Tensor:
        """This process's slice of (batch, tokens), of shape (batch, padded_length / size)."""
        whole = F.pad(tokens, (0, self.padded_length(tokens.shape[1]) - tokens.shape[1]), value=padding)
        return whole.chunk(self.size, dim=1)[self.rank]

    def exchange(self, values: Tensor) -> Tensor:
        """Divides dimension 1 among the processes, and makes dimension 2 whole: (batch, heads, slice, width) becomes
        (batch, heads / size, tokens, width), and (batch, tokens, heads / size, width) becomes (batch, slice, heads,
        width)."""
        parts = values.unflatten(1, (self.size, -1)).movedim(1, 0)
        return all_to_all_single_autograd(parts.contiguous(), None, None, self._group).movedim(0, 2).flatten(2, 3)

    def total(self, own: Tensor) -> Tensor:
        """The sum of a value over the group, in each process. Its gradient is the gradient of this process's share."""
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self._group)
        return own + (whole - own.detach())


class DividesSequences(Protocol):
    """The attribute `sequence_parallel` of a model that trains on slices of samples."""

    def check(self, size: int) -> None:
        """Raises UsageError if `size` processes cannot share the tokens of a sample."""

    def divide(self, group: SequenceGroup) -> None:
        """Makes the model's forward pass compute on slices. It still takes whole samples, and returns whole losses."""


def divider_of(model: nn.Module, size: int) -> DividesSequences:
    """The object that divides the sequences of a model, or of one in it. Raises UsageError if `size` does not work."""
    found: list[Any] = [module.sequence_parallel for module in model.modules() if hasattr(module, "sequence_parallel")]
    if not found:
        raise UsageError(
            f"{type(model).__name__} cannot divide sequences",
            "use --config_file accelerate_configs/fsdp2.yaml, or use a causal model of transformers with its losses, "
            "as recipes/transformer.py does",
        )
    found[0].check(size)
    return found[0]
