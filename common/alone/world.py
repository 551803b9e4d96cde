"""A world of one process: what the recipe's code sees in it is what `python recipe.py` shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from ..environment import without_ranks

ALONE = {
    "num_processes": 1,
    "process_index": 0,
    "local_process_index": 0,
    "distributed_type": DistributedType.NO,
}


@contextmanager
def one_process(accelerator: Accelerator) -> Iterator[None]:
    """Within the `with` block, Accelerate, torch.distributed and the launcher's variables describe a single process.
    Collectives act in a group of one."""
    states: list[dict[str, Any]] = [PartialState._shared_state, AcceleratorState._shared_state]
    before = [{name: state[name] for name in ALONE if name in state} for state in states]
    with _group_of_one(accelerator), without_ranks():
        for state, own in zip(states, before):
            state.update({name: ALONE[name] for name in own})
        try:
            yield
        finally:
            for state, own in zip(states, before):
                state.update(own)


@contextmanager
def _group_of_one(accelerator: Accelerator) -> Iterator[None]:
    if not dist.is_initialized():
        yield
        return
    groups = dist.distributed_c10d._world  # torch 2.14 counts this group, whose number names the next one of all
    count = groups.group_count
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    groups.group_count = count
    world, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    answers: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
    functions = {name: _noting(accelerator, name, answer) for name, answer in answers.items()}
    before = {name: getattr(dist, name) for name in functions}
    for name, function in functions.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        dist.GroupMember.WORLD = world
        dist.destroy_process_group(group)


def _noting(accelerator: Accelerator, name: str, answer: Any) -> Callable:
    """Replaces a function of torch.distributed, and records who calls it."""
    function = getattr(dist, name)

    def asked(group: Any = None) -> Any:
        if hasattr(accelerator, "note"):  # that of `start`
            accelerator.note(f"torch.distributed.{name}")
        return answer if group is None else function(group)

    return asked
