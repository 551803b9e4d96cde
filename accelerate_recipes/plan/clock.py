"""How long a step takes: the operations and collectives of a process, on a GPU and its links."""

from collections.abc import Sequence
from typing import Any

from accelerate_recipes.plan.hardware import Gpu

Event = Sequence[Any]  # ["compute", seconds] or [collective, bytes, group, runs beside], as in Tracker


def sent(collective: str, size: float, num_ranks: int) -> float:
    """Bytes that a process sends in a collective by rings (Patarasuk and Yuan 2009), for a whole tensor of so many
    bytes."""
    if collective == "send":
        return size
    return size * (num_ranks - 1) / num_ranks * (2 if collective == "all_reduce" else 1)


def num_machines(group: Sequence[int], per_machine: int) -> int:
    """On how many machines a group has processes."""
    first, count, distance = group
    return (
        (first + (count - 1) * distance) // per_machine - first // per_machine + 1 if distance < per_machine else count
    )


def num_sent(events: Sequence[Event], per_machine: int) -> dict[str, float]:
    """{"link" or "network": bytes that a process sends} inside a machine, and between machines."""
    total = {"link": 0.0, "network": 0.0}
    for kind, *facts in events:
        if kind != "compute":
            size, group, _ = facts
            where = "network" if num_machines(group, per_machine) > 1 else "link"
            total[where] += sent(kind, size, group[1])
    return total


def seconds_of(event: Event, gpu: Gpu, per_machine: int) -> float:
    """Time of a collective: latency, and bytes at the rate of the slowest link. A group with several processes on each
    machine leaves it by all of their network cards."""
    kind, size, group, _ = event
    machines = num_machines(group, per_machine)
    bytes_sent, rounds = sent(kind, size, group[1]), 2 if kind == "all_reduce" else 1
    if machines == 1:
        return rounds * gpu.link_latency + bytes_sent / (gpu.link * gpu.reached_link)
    cards = max(1, group[1] // machines)
    rate = min(gpu.network * gpu.reached_network * cards, gpu.link * gpu.reached_link)
    # The latency of a tree: it grows with the logarithm of the number of machines.
    return rounds * (gpu.link_latency + gpu.network_latency * (machines - 1).bit_length()) + bytes_sent / rate


def step_seconds(events: Sequence[Event], gpu: Gpu, per_machine: int) -> tuple[float, float]:
    """(time of a step, the part of it in which the process waits for collectives).

    Computation and collectives are two streams. A collective that runs beside the computation starts when the program
    issues it, after the one before; a gather as soon as the computation before the previous gather ended, because FSDP2
    prefetches one layer. The computation waits for a gather, and at its end for all.
    """
    compute = waited = free = before_gather = 0.0
    for event in events:
        if event[0] == "compute":
            compute += event[1]
            continue
        seconds = seconds_of(event, gpu, per_machine)
        if not event[3]:
            compute, waited = compute + seconds, waited + seconds
            continue
        is_gather = event[0] == "all_gather"
        free = max(free, before_gather if is_gather else compute) + seconds
        if is_gather:
            before_gather = compute
            waited, compute = waited + max(0.0, free - compute), max(free, compute)
    return max(compute, free), waited + max(0.0, free - compute)


def grown(events: Sequence[Event], num_processes: int, wanted: int) -> list[Event]:
    """The events with more processes, each with the same samples as before: the outermost groups grow."""
    result: list[Event] = []
    for event in events:
        if event[0] == "compute" or event[0] == "send":
            result.append(event)
            continue
        kind, size, (first, count, distance), beside = event
        if count * distance >= num_processes:  # it reaches from the first to the last processes
            count = wanted // distance
        result.append([kind, size, [first, count, distance], beside])
    return result
