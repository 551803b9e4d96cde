"""Pipeline schedules: the order of the passes in a step, from torch, and their costs."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..step.guards import not_used

Shape = tuple[torch.Size, torch.dtype]
Before = Callable[[int, int, bool], None]  # (stage, micro-batch, whether the pass is a forward one)


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch.distributed.pipelining."""

    kind: str  # its class there
    per_process: int = 1  # how many stages a process has, at equal distances
    # A process has stage s and the stage equally far from the end. A backward pass has two parts: for the hidden
    # states, which others wait for, and later for the weights.
    is_zero_bubble: bool = False

    def places(self, size: int) -> dict[int, int]:
        """{stage: its process} of a pipeline of `size` processes."""
        stages = range(size * self.per_process)
        return {stage: min(stage, stages[-1 - stage]) if self.is_zero_bubble else stage % size for stage in stages}


SCHEDULES = {
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", per_process=2),
    "zbv": Schedule("ScheduleZBVZeroBubble", per_process=2, is_zero_bubble=True),
}


@dataclass(frozen=True)
class Cost:
    """The cost of a schedule, if a forward pass through all layers of a process takes 1, and a backward pass 2."""

    idle: float  # share of the time of a step in which the busiest process waits
    live: list[float]  # of each process, the most micro-batches that keep their activations, each in all its layers

    def __str__(self) -> str:
        live = ", ".join(f"{number:g}" for number in self.live)
        return f"{self.idle:.0%} of the time idle; activations of at most {live} micro-batches in its processes"


def cost(name: str, size: int, num_micro_batches: int) -> Cost:
    """The cost of a schedule of `SCHEDULES` for a pipeline of `size` processes, each with at least one micro-batch. The
    test compares these formulas with torch's own lists of actions."""
    number, later = num_micro_batches, range(size, 0, -1)  # for each process, itself and those after it
    if name == "1f1b":
        return Cost((size - 1) / (number + size - 1), [*later])
    if name == "interleaved":
        in_round = number // (number // size)
        return Cost((size - 1) / (2 * number + size - 1), [min(number, (in_round + 2 * n - 1) / 2) for n in later])
    longest = max(6 * number + size - 1, 4 * number + 4 * size - 2)
    return Cost(1 - 6 * number / longest, [min(size, (number + size - n + 1) / 2) for n in later])


def shortest(name: str, size: int, num_micro_batches: int) -> tuple[int, int]:
    """(The fewest micro-batches with which each process holds as many activations as with `num_micro_batches`, and the
    next larger number that the schedule takes.) All others follow from these two."""
    number = num_micro_batches
    in_round = number // (number // size) if name == "interleaved" else size
    first = min(number, in_round * SCHEDULES[name].per_process)
    return first, min(number, first + (in_round if name == "interleaved" else 1))


@contextmanager
def its_cause() -> Iterator[None]:
    """Raises the cause of an error of torch's pipelines: their error has only a log of the schedule, and no message."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


def _passing_stage() -> Any:
    """Stages that know each micro-batch's shape, and keep what they receive while they need it. Also for torch 2.11."""
    from torch.distributed.pipelining import PipelineStage  # the import takes a second

    class PassingStage(PipelineStage):
        shapes: Sequence[Shape]  # of this step, as `before`
        before: Before
        differentiated: set[int]  # stages whose input the loss of this step depends on
        # Of one shape for all, in torch 2.11; in later versions it is `_runtime_validate`.
        _validate_fwd_input = _validate_fwd_outputs = lambda *_: None

        def room(self, index: int) -> Tensor:
            shape, dtype = self.shapes[index]
            return torch.empty(shape, dtype=dtype, device=self.device)

        def _get_init_p2p_neighbors_ops(self) -> Any:
            # Leaves out torch 2.11's operations from a process to itself, which gloo does not support.
            return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
            if not self.is_first:
                self.args_recv_info[fwd_chunk_id][0].buffer = self.room(fwd_chunk_id).requires_grad_()
            return super().get_fwd_recv_ops(fwd_chunk_id)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
            if not self.is_last:
                self.grad_recv_info[bwd_chunk_id][0].buffer = self.room(bwd_chunk_id)
            return super().get_bwd_recv_ops(bwd_chunk_id)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            self.before(self.stage_index, fwd_chunk_id, True)
            with its_cause():
                return super().forward_one_chunk(fwd_chunk_id, *args, **options)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
            self.before(self.stage_index, bwd_chunk_id, False)
            with its_cause():
                super().backward_one_chunk(bwd_chunk_id, *args, **options)
            for each in (*self.args_recv_info.get(bwd_chunk_id, ()), *self.grad_recv_info.get(bwd_chunk_id, ())):
                each.buffer = torch.empty(0)  # torch keeps it until the next step, and 2.11 refuses None
            is_missing = not self.is_first and self.bwd_cache[bwd_chunk_id][0] is None
            if is_missing:  # the loss does not depend on it
                self.bwd_cache[bwd_chunk_id] = (torch.zeros_like(self.room(bwd_chunk_id)),)
            self.differentiated |= set() if is_missing else {self.stage_index}

    return PassingStage


def make_steps(
    schedule: Schedule, size: int, roots: Mapping[int, nn.Module], device: torch.device, group: Any
) -> Callable[[Sequence[Shape], Before], None]:
    """A function that takes a step's passes through the stages of a pipeline of `size` processes. It gets the shape and
    type of each micro-batch's hidden states, and a function to call before each pass. `roots`: {stage: module} here."""
    from torch.distributed import pipelining

    # Torch would take an extra step to find a shape, and then allow only this one.
    one, kind = torch.empty(1, device="meta", requires_grad=True), _passing_stage()
    num_stages = size * schedule.per_process
    own: Any = [kind(root, index, num_stages, device, one, one, group=group) for index, root in roots.items()]
    options: Any = {"loss_fn": lambda output, target: output, "scale_grads": False}
    make = partial(getattr(pipelining, schedule.kind), own[0] if schedule.per_process == 1 else own, **options)
    made, earlier = lru_cache(maxsize=1)(make), set[int]()

    def take(shapes: Sequence[Shape], before: Before) -> None:
        now = set[int]()
        for stage in own:
            stage.shapes, stage.before, stage.differentiated, stage._runtime_validate = shapes, before, now, False
        number = len(shapes)
        first = [torch.zeros(number, device=device)] * (0 in roots)  # only their number matters
        made(number).step(*first, target=torch.arange(number), losses=[], return_outputs=False)
        for stage in earlier - now:  # an optimizer updates weights with a gradient of zeros, but not without one
            raise not_used(f"the loss of this step does not depend on the layers before stage {stage + 1}")
        earlier.update(now)

    return take
