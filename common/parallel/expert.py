"""Expert parallelism: each process of a group holds some of the experts of each layer, and has its own samples.

Before the experts, the processes of a group gather all their tokens. Each takes the tokens that the router sends to its
experts. Then the outputs are summed, and each process gets the outputs of its tokens. GShard (Lepikhin et al. 2020) and
DeepSpeed-MoE send each token only where it goes. Here no size depends on the router, so a GPU never has to wait for a
size. The traffic is the same if each token has at least as many experts as the group has processes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from ..config import RunConfig
from ..errors import UsageError
from ..layout import Layout
from ..plan import Plan
from ..step.refusals import sizes_that_divide
from ..weights.on_disk import materialized
from ..weights.shards import local
from .grid import Grid
from .sharding import offloads
from .strategy import Strategy
from .tensor_styles import Mirrored, TensorGroup, divide_weight, gather, other_weights, sum_scattered


def check_config(layout: Layout, config: RunConfig) -> None:
    """Refuses experts under DDP or DeepSpeed, or a group size that does not divide the processes."""
    if not {"FSDP2", "TP"} & {*layout.strategies}:  # Accelerate refuses divided weights under DDP
        raise UsageError(
            f"--expert_parallel {layout.ep} needs FSDP2 for the other weights",
            "use --config_file accelerate_configs/fsdp2_expert_parallel.yaml",
        )
    if (num_processes := layout.num_processes // layout.pp) % layout.ep:
        raise UsageError(
            f"--expert_parallel {layout.ep} does not divide {num_processes} processes{' of a stage' * (layout.pp > 1)}",
            f"use --num_processes {layout.ep * layout.pp} after accelerate launch",
        )
    if offloads(layout):
        raise UsageError(
            "--expert_parallel does not work with fsdp_offload_params", "use false there in the config file"
        )
    if config.compile:
        raise UsageError("--expert_parallel does not work with --compile", "remove one of them")


def check_experts(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a model without experts, or whose number of experts does not divide evenly."""
    found, size = experts_of(model), plan.layout.ep
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no experts of transformers 5 to divide",
            "remove --expert_parallel, or use a mixture of experts, as recipes/transformer.py --num_experts 4 does",
        )
    for name, experts in found.items():
        if experts.num_experts % size:
            raise UsageError(
                f"{name} has {experts.num_experts} experts, not divisible by {size} processes",
                f"use --expert_parallel {sizes_that_divide(experts.num_experts)}",
            )


class ExpertParallel(Strategy):
    name = "EP"
    axis = "ep"
    takes_fp16 = False
    wraps = False
    launch_checks = (check_config,)
    model_checks = (check_experts,)

    def divide(self, model: nn.Module, root: nn.Module, plan: Any, grid: Grid) -> None:
        group = ExpertGroup(grid.experts, TensorGroup(grid.mesh["tp"]) if grid.layout.tp > 1 else None)
        for experts in experts_of(model).values():
            with materialized(experts, grid.device):
                for name in dict(experts.named_parameters()):
                    divide_weight(experts, name, grid.experts, [Replicate(), Shard(0)])
            group.take_over(experts)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """{name: the experts of a layer}: modules of transformers that take (tokens, experts of each, weights of these)."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed")  # their decorator sets it
        and all(weight.shape[0] == module.num_experts for weight in module.parameters())
    }


class ExpertGroup:
    """The processes that share the experts of each layer. `mesh`: of them, with "replicas" of the group; `tensor`: the
    processes that share each layer and have the same tokens."""

    def __init__(self, mesh: Any, tensor: TensorGroup | None = None):
        # The first expert of this process is number rank × (experts / size).
        self.size, self.rank = mesh["experts"].size(), mesh.get_local_rank("experts")
        self._group, self._replicas = mesh.get_group("experts"), mesh.get_group("replicas")
        self._tensor, self._num_replicas = tensor, mesh["replicas"].size()
        self._ways = [partial(way, size=self.size, group=self._group.group_name) for way in (gather, sum_scattered)]
        self._counts = self._group  # for the numbers of tokens, which the CPU must know
        if mesh.device_type != "cpu":
            self._counts = dist.new_group(mesh["experts"].mesh.tolist(), backend="gloo", use_local_synchronization=True)

    def take_over(self, experts: Any) -> None:
        """Makes a module of experts that holds its share of the weights compute the tokens of all processes."""
        forward, config = experts.forward, experts.config
        experts.num_experts //= self.size
        experts._is_expert_parallel = True  # indices of other processes' experts count as no expert
        if config._experts_implementation == "eager":  # it may leave a weight without a gradient
            config._experts_implementation = "grouped_mm"
        for weight in experts.parameters():
            if weight.requires_grad and self._num_replicas > 1:
                weight.register_hook(self._sum_over_replicas)

        def on_all_tokens(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            missing = self._longest(len(hidden)) - len(hidden)

            def gathered(values: Tensor, padding: int = 0) -> Tensor:
                return Mirrored.apply(F.pad(values, (0, 0, 0, missing), value=padding), *self._ways)

            index = gathered(index, -1) - self.rank * experts.num_experts
            tokens, shares = gathered(hidden), gathered(weights)
            is_other = (index < 0) | (index >= experts.num_experts)
            index, shares = index.masked_fill(is_other, experts.num_experts), shares.masked_fill(is_other, 0.0)
            with other_weights(experts, lambda weight: local(weight).to(hidden.dtype)):
                output = forward(tokens, index, shares)
            return Mirrored.apply(output, *self._ways[::-1])[: len(hidden)]

        experts.forward = partial(_divide_tokens, self._tensor, on_all_tokens) if self._tensor else on_all_tokens

    def _sum_over_replicas(self, gradient: Any) -> Any:
        """The gradient for the tokens of all groups, from this group's gradient."""
        own = gradient.to_local().clone()  # autograd may need the gradient elsewhere
        dist.all_reduce(own, group=self._replicas)
        return type(gradient).from_local(own, gradient.device_mesh, gradient.placements, run_check=False)

    def _longest(self, number: int) -> int:
        """The largest number of tokens of any process; a collective."""
        count = torch.tensor(number)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self._counts)
        return int(count)


def _divide_tokens(group: TensorGroup, run: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """The result of `run` for tokens that all processes of a group have; each computes its share."""
    own = (group.split(F.pad(each, (0, 0, 0, -len(each) % group.size)).T).T for each in values)
    return group.gather(run(*own).T).T[: len(values[0])]
