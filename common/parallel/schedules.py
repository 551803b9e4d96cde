"""The order in which the stages of a pipeline take the passes of a step: torch's schedules, and what each costs."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Shape = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch.distributed.pipelining.

    Attributes:
        kind: its class there.
        per_process: how many stages a process has.
        is_v: a process has stage s and the one that is as far from the end, and not every so many.
        splits: a backward pass is two: for the hidden states, which others wait for, and later for the weights.
    """

    kind: str
    per_process: int = 1
    is_v: bool = False
    splits: bool = False

    def stages_of(self, process: int, size: int) -> list[int]:
        """The stages of a process of a pipeline of `size` processes."""
        if self.is_v:
            return [process, 2 * size - 1 - process]
        return [process + number * size for number in range(self.per_process)]

    def places(self, size: int) -> dict[int, int]:
        """{stage: its process} of a pipeline of `size` processes."""
        return {stage: process for process in range(size) for stage in self.stages_of(process, size)}


SCHEDULES = {
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", per_process=2),
    "zbv": Schedule("ScheduleZBVZeroBubble", per_process=2, is_v=True, splits=True),
}


class Passes(Protocol):
    """What a schedule asks for while it takes a step."""

    def before_forward(self, stage: int, index: int) -> None:
        """Stage `stage` begins with micro-batch `index`."""

    def before_backward(self, stage: int, index: int) -> None:
        """The same, for its backward pass."""

    def shape(self, index: int) -> Shape:
        """Shape and type of the hidden states of micro-batch `index`."""


class Steps:
    """Takes the passes of optimizer steps through the stages of a pipeline.

    Args:
        schedule: of `SCHEDULES`.
        roots: {stage: module that runs it}, of this process.
        num_micro_batches: of a step.
        device: of the stages.
        group: of the processes of the pipeline.
        passes: of the stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        roots: Mapping[int, nn.Module],
        num_micro_batches: int,
        device: torch.device,
        group: Any,
        passes: Passes,
    ):
        from torch.distributed import get_world_size, pipelining  # the import takes a second

        num_stages, kind = get_world_size(group) * schedule.per_process, _stage_type()
        stages = [kind(root, index, num_stages, device, group, passes) for index, root in roots.items()]
        own: Any = stages[0] if schedule.per_process == 1 else stages
        options: Any = {"loss_fn": lambda output, target: output, "scale_grads": False}
        self._schedule = getattr(pipelining, schedule.kind)(own, num_micro_batches, **options)
        self._inputs = [torch.zeros(num_micro_batches, device=device)] * (0 in roots)  # their number, no more
        self._target = torch.arange(num_micro_batches) if num_stages - 1 in roots else None

    def take(self) -> None:
        """The forward and backward passes of a step."""
        self._schedule.step(*self._inputs, target=self._target, losses=[], return_outputs=False)


def _stage_type() -> Any:
    from torch.distributed.pipelining import PipelineStage

    class PassingStage(PipelineStage):
        """A stage that knows the shape of each micro-batch, and has room for what it receives only while it does."""

        def __init__(
            self, root: nn.Module, index: int, num_stages: int, device: torch.device, group: Any, passes: Passes
        ):
            # Torch would take a whole step more to find a shape, and let it be the only one.
            one = torch.empty(1, device="meta", requires_grad=True)
            super().__init__(root, index, num_stages, device, one, one, group=group)
            self._passes, self._runtime_validate = passes, False

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
            if not self.is_first:
                self.args_recv_info[fwd_chunk_id][0].buffer = self._room(fwd_chunk_id)
            return super().get_fwd_recv_ops(fwd_chunk_id)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
            if not self.is_last:
                self.grad_recv_info[bwd_chunk_id][0].buffer = self._room(bwd_chunk_id)
            return super().get_bwd_recv_ops(bwd_chunk_id)

        def _room(self, index: int) -> Tensor:
            shape, dtype = self._passes.shape(index)
            return torch.empty(shape, dtype=dtype, device=self.device)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            self._passes.before_forward(self.stage_index, fwd_chunk_id)
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **options)
            except RuntimeError as error:  # torch's own, around the cause
                raise error.__cause__ or error from None

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
            self._passes.before_backward(self.stage_index, bwd_chunk_id)
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
            gradients = self.bwd_cache.get(bwd_chunk_id, ())
            if not self.is_first and gradients[:1] == (None,):  # the loss does not depend on it
                self.bwd_cache[bwd_chunk_id] = (torch.zeros_like(self._room(bwd_chunk_id)),)

    return PassingStage


@dataclass(frozen=True)
class Cost:
    """What a schedule costs, if a forward pass through all layers of a process takes 1, and a backward pass 2.

    Attributes:
        idle: share of the time of a step in which the busiest process waits.
        live: for each process, how many micro-batches keep their activations at most, each in all of its layers.
    """

    idle: float
    live: list[float]

    def __str__(self) -> str:
        live = ", ".join(f"{number:g}" for number in self.live)
        return f"{self.idle:.0%} of the time idle; activations of at most {live} micro-batches in its processes"


def cost(name: str, size: int, num_micro_batches: int) -> Cost:
    """The cost of a schedule of `SCHEDULES`, from torch's own lists of its actions. Raises ValueError for a number of
    micro-batches that it does not take."""
    schedule = SCHEDULES[name]
    queues = [[each for each in own if each[0] in _COSTS] for own in _actions(schedule, size, num_micro_batches)]
    last, done, total = size * schedule.per_process - 1, dict[tuple[str, int, int], float](), 0.0
    ready, busy, live, most = ([0.0] * size for _ in range(4))
    while any(queues):
        for process, queue in enumerate(queues):
            while queue:
                kind, stage, index = queue[0]
                needs = [("F", stage, index)] if kind != "F" else [("F", stage - 1, index)] * (stage > 0)
                needs += [("I", stage + 1, index)] * (kind in "BI" and stage < last) + [("I", stage, index)] * (
                    kind == "W"
                )
                if any(need not in done for need in needs):
                    break
                spent = _COSTS[kind] / schedule.per_process
                end = max([ready[process], *(done[need] for need in needs)]) + spent
                ready[process], busy[process], total = end, busy[process] + spent, max(total, end)
                done["I" if kind == "B" else kind, stage, index] = end
                live[process] += {"F": 1, "I": 0}.get(kind, -1) / schedule.per_process
                most[process] = max(most[process], live[process])
                del queue[0]
    return Cost(1 - max(busy) / total, most)


_COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def _actions(schedule: Schedule, size: int, num_micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """(F, B, I or W; stage; micro-batch) of each process, in their order."""
    if schedule.kind == "Schedule1F1B":  # torch's list of it is for display, and leaves out micro-batch 0
        return [_one_forward_one_backward(process, size, num_micro_batches) for process in range(size)]
    from torch.distributed import pipelining

    num_stages = size * schedule.per_process
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.ERROR)
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=size, group_rank=0, is_first=index == 0,
            is_last=index == num_stages - 1, submod=nn.Identity(), stage_index_to_group_rank={},
        )
        for index in schedule.stages_of(0, size)
    ]  # fmt: skip
    try:
        made = getattr(pipelining, schedule.kind)(stages, num_micro_batches, loss_fn=lambda *_: None)
    finally:
        logger.setLevel(level)
    return [[action for each in made.pipeline_order[process] for action in _parts(each)] for process in range(size)]


def _parts(action: Any) -> list[tuple[str, int, int]]:
    parts = [] if action is None else action.sub_actions or [action]
    return [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in parts]


def _one_forward_one_backward(process: int, size: int, num_micro_batches: int) -> list[tuple[str, int, int]]:
    if num_micro_batches < size:
        raise ValueError(f"{num_micro_batches} micro-batches are fewer than {size} stages")
    ahead = size - process
    forward = [("F", process, index) for index in range(num_micro_batches)]
    backward = [("B", process, index) for index in range(num_micro_batches)]
    rest: Sequence[Any] = [each for pair in zip(backward, forward[ahead:]) for each in pair]
    return [*forward[:ahead], *rest, *backward[len(forward[ahead:]) :]]
