"""The styles of a plan of tensor parallelism, as torch applies them. The import takes 0.7 s."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .tensor_plan import EXPERTS, NORM_OF_HEADS, SHARED_KEYS, dims_of, is_conv1d


def parallel_style(style: str) -> ParallelStyle:
    """What divides a module in this style of a plan."""
    name, _, number = style.rpartition("_")
    if number.isdigit():
        return SharedKeys(int(number)) if name == SHARED_KEYS else PackedColwise(int(number))
    whole = Replicate()
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": Colwise,
        "rowwise": Rowwise,
        "colwise_rep": lambda: Colwise(output_layouts=whole),
        "colwise_gather_output": lambda: Colwise(output_layouts=whole),
        "rowwise_rep": lambda: Rowwise(input_layouts=whole),
        "rowwise_split_input": lambda: Rowwise(input_layouts=whole),
        "embedding_rowwise": lambda: Rowwise(input_layouts=whole),
        # The weight is whole, and its gradient the sum over the parts. Any dimension but the last will do.
        NORM_OF_HEADS: lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
        EXPERTS: Experts,
    }
    return styles[style]()


class Colwise(ColwiseParallel):
    """Also of GPT-2's Conv1D."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_conv1d(module):
            return super()._apply(module, device_mesh)
        given = partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts)
        returned = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
        return distribute_module(module, device_mesh, partial(_divide, 0), given, returned)


class Rowwise(RowwiseParallel):
    """Also of GPT-2's Conv1D."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_conv1d(module):
            return super()._apply(module, device_mesh)
        given = partial(self._prepare_input_fn, self.input_layouts, (Shard(-1),))
        returned = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
        return distribute_module(module, device_mesh, partial(_divide, 1), given, returned)


def _divide(end: int, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Divides a layer by its outputs (0) or its inputs (1)."""
    for key, weight in list(module.named_parameters()):
        dim = dims_of(module)[end] if weight.ndim > 1 else 0
        _divide_weight(module, key, mesh, Replicate() if weight.ndim == 1 and end == 1 else Shard(dim))


def _divide_weight(module: nn.Module, key: str, mesh: DeviceMesh, placement: Placement) -> None:
    weight = module.get_parameter(key)
    divided = distribute_tensor(weight, mesh, [placement])
    module.register_parameter(key, nn.Parameter(divided, weight.requires_grad))


def _given(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same value, which each process gets whole and of whose gradient each has a part."""
    whole: Any = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


class PackedColwise(ParallelStyle):
    """Divides the outputs of a layer that are several equal parts side by side: a process holds its share of each. The
    pass works on plain tensors, because torch's operations know no such shards."""

    def __init__(self, packs: int):
        super().__init__()
        self._packs = packs

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        for key, weight in list(module.named_parameters()):
            dim = dims_of(module)[0] if weight.ndim > 1 else 0
            _divide_weight(module, key, device_mesh, _StridedShard(dim, split_factor=self._packs))

        def forward(value: Tensor) -> Tensor:
            weight, bias = module.weight.to_local(), None if module.bias is None else module.bias.to_local()
            return nn.functional.linear(_given(value, device_mesh), weight.T if is_conv1d(module) else weight, bias)

        module.forward = forward
        return module


class Experts(ParallelStyle):
    """Divides the width of each expert. Both halves of the first weight, gate and up, are colwise."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        _divide_weight(module, "gate_up_proj", device_mesh, _StridedShard(1, split_factor=2))
        _divide_weight(module, "down_proj", device_mesh, Shard(2))
        own = module.forward

        def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            before = dict(module._parameters)
            module._parameters.update({key: weight.to_local() for key, weight in before.items()})
            try:
                part = own(_given(hidden, device_mesh), index, _given(weights, device_mesh))
            finally:
                module._parameters.update(before)
            whole: Any = DTensor.from_local(part, device_mesh, [Partial()], run_check=False)
            return whole.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward
        return module


class SharedKeys(ParallelStyle):
    """For a layer that stays whole, and whose last outputs each process uses for its own heads."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self._num = num_outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def end_is_given(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return torch.cat([output[..., : -self._num], _given(output[..., -self._num :], device_mesh)], -1)

        module.register_forward_hook(end_is_given)
        return module
