"""How long a step takes: the operations and collectives of a process, on a GPU and its links."""

from collections.abc import Sequence

from accelerate_recipes.plan.estimates import Collective, Event, Group, Sent
from accelerate_recipes.plan.hardware import Gpu


def bytes_to_send(collective: str, size: float, num_ranks: int) -> float:
    """Bytes that a process sends in a collective by rings (Patarasuk and Yuan 2009), of a whole tensor's bytes."""
    if collective == "send":
        return size
    return size * (num_ranks - 1) / num_ranks * (2 if collective == "all_reduce" else 1)


def num_machines(group: Group, per_machine: int) -> int:
    """The number of machines with processes of a group."""
    first, count, distance = group
    last = first + (count - 1) * distance
    return count if distance >= per_machine else last // per_machine - first // per_machine + 1


def num_sent(events: Sequence[Event], per_machine: int) -> Sent:
    """The bytes that a process sends."""
    link = network = 0.0
    for event in events:
        if isinstance(event, Collective):
            size = bytes_to_send(event.kind, event.num_bytes, event.group.size)
            is_inside = num_machines(event.group, per_machine) == 1
            link, network = (link + size, network) if is_inside else (link, network + size)
    return Sent(link, network)


def seconds_of(event: Collective, gpu: Gpu, per_machine: int) -> float:
    """Time of a collective: latency, and bytes over the slowest link; a group uses all network cards of a machine."""
    kind, size, group, _ = event
    machines = num_machines(group, per_machine)
    bytes_sent, rounds = bytes_to_send(kind, size, group.size), 2 if kind == "all_reduce" else 1
    if machines == 1:
        return rounds * gpu.link_latency + bytes_sent / (gpu.link * gpu.reached_link)
    rate = min(gpu.network * gpu.reached_network * max(1, group.size // machines), gpu.link * gpu.reached_link)
    # The latency of a tree: it grows with the logarithm of the number of machines.
    return rounds * (gpu.link_latency + gpu.network_latency * (machines - 1).bit_length()) + bytes_sent / rate


def step_seconds(events: Sequence[Event], gpu: Gpu, per_machine: int) -> tuple[float, float]:
    """(time of a step, the part of it in which the process waits for collectives).

    Computation and collectives are two streams. A collective that runs beside the computation starts when the program
    issues it, after the previous one; a gather starts when the computation before the previous gather ends: FSDP2
    prefetches one layer. The computation waits for a gather, and at its end for all collectives.
    """
    compute = waited = free = before_gather = 0.0
    for event in events:
        if isinstance(event, float):
            compute += event
            continue
        seconds = seconds_of(event, gpu, per_machine)
        if not event.beside:
            compute, waited = compute + seconds, waited + seconds
            continue
        is_gather = event.kind == "all_gather"
        free = max(free, before_gather if is_gather else compute) + seconds
        if is_gather:
            before_gather = compute
            waited, compute = waited + max(0.0, free - compute), max(free, compute)
    return max(compute, free), waited + max(0.0, free - compute)


def grow(events: Sequence[Event], num_processes: int, wanted: int) -> list[Event]:
    """The events with more processes, each with the same samples as before: the outermost groups grow."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, Collective) and event.kind != "send":
            group = event.group
            if group.size * group.distance >= num_processes:  # it reaches from the first process to the last
                event = event._replace(group=group._replace(size=wanted // group.distance))
        result.append(event)
    return result
