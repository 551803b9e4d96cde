"""The styles of a plan of tensor parallelism, as torch applies them. The import takes 0.7 s."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import _StridedShard

from .tensor_plan import NORM_OF_HEADS, PACKED, dims_of, is_conv1d


def parallel_style(style: str) -> ParallelStyle:
    """What divides a module in this style of a plan."""
    if style == NORM_OF_HEADS:  # the weight is whole, and its gradient the sum over the parts
        return SequenceParallel(sequence_dim=1, use_local_output=True)  # any dimension but the last will do
    if style in ("colwise_rep", "colwise_gather_output"):
        return Colwise(output_layouts=Replicate())
    if style in ("rowwise_rep", "embedding_rowwise"):
        return Rowwise(input_layouts=Replicate())
    if packed := PACKED.fullmatch(style):
        return PackedColwise(int(packed[1]))
    return Colwise() if style == "colwise" else Rowwise()


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
        placement = Replicate() if weight.ndim == 1 and end == 1 else Shard(dim)
        divided = nn.Parameter(distribute_tensor(weight, mesh, [placement]), requires_grad=weight.requires_grad)
        module.register_parameter(key, divided)


class PackedColwise(ParallelStyle):
    """Divides the outputs of a layer that are several equal parts side by side: a process holds its share of each. The
    pass works on plain tensors, because torch's operations know no such shards."""

    def __init__(self, packs: int):
        super().__init__()
        self._packs = packs

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        for key, weight in list(module.named_parameters()):
            placement = _StridedShard(dims_of(module)[0] if weight.ndim > 1 else 0, split_factor=self._packs)
            divided = nn.Parameter(distribute_tensor(weight, device_mesh, [placement]), weight.requires_grad)
            module.register_parameter(key, divided)

        def forward(given: Tensor) -> Tensor:
            whole: Any = DTensor.from_local(given, device_mesh, [Replicate()], run_check=False)
            weight, bias = module.weight.to_local(), None if module.bias is None else module.bias.to_local()
            # Each process has a part of the gradient of what it was given; `from_local` sums them.
            part = whole.to_local(grad_placements=[Partial()])
            return nn.functional.linear(part, weight.T if is_conv1d(module) else weight, bias)

        module.forward = forward
        return module
