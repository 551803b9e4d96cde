"""Finds the chain of layers of a model that a pipeline can cut into stages, by a pass in one process."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import UsageError
from ..seeds import generator_states
from ..step.guards import used_weights

FSDP2 = "use --config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"


@dataclass(frozen=True)
class Chain:
    """Layers of which each gets the hidden states that the one before it gave, all of one shape.

    Attributes:
        layers: their names, in the order of the pass.
        outputs: {layer: how many values it returns as a tuple, with the hidden states first; 0: the hidden states}.
        uses: {parameter or buffer: the numbers of the layers that use it; -1: before them, len(layers): after them}.
    """

    layers: Sequence[str]
    outputs: Mapping[str, int]
    uses: Mapping[str, frozenset[int]]

    def stages_of(self, name: str, bounds: Sequence[int]) -> frozenset[int]:
        """The stages that hold a parameter or a buffer: those that use it, and the first if none does."""
        ends = [place for place in self.uses[name] if 0 <= place < len(self.layers)]
        found = {next(stage for stage, end in enumerate(bounds[1:]) if place < end) for place in ends}
        found |= {0} if -1 in self.uses[name] or not self.uses[name] else set()
        return frozenset(found | ({len(bounds) - 2} if len(self.layers) in self.uses[name] else set()))


def layer_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Cuts a chain of layers into stages of about equal length; the last stage, which has the head, gets no extra one.

    Returns:
        num_stages + 1 indices: stage s holds layers bounds[s] to bounds[s + 1] - 1.
    """
    return [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]


def hidden_states(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What a layer of a chain gets from the one before it: its first argument."""
    return args[0] if args else next(iter(named.values()), None)


@dataclass
class _Call:
    """A call of a layer in a list: what it got and gave, and when it began and ended."""

    name: str
    given: Any
    began: int
    state: Any  # of the generators of random numbers
    ended: int = 0
    state_after: Any = None
    output: Any = None

    @property
    def hidden(self) -> Any:
        return self.output[0] if isinstance(self.output, tuple) and self.output else self.output

    @property
    def keeps_shape(self) -> bool:
        values = self.given, self.hidden
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        return len(tensors) == 2 and tensors[0].shape == tensors[1].shape


@dataclass
class _Trace(TorchDispatchMode):
    """Notes the calls of layers, and when a weight or buffer was used."""

    names: dict[Tensor, str]
    clock: int = 0
    calls: list[_Call] = field(default_factory=list)
    used: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each in self.names:
                self.used.setdefault(self.names[each], set()).add(self.clock)
        return function(*args, **(kwargs or {}))


def find_chain(model: nn.Module, forward: Callable[[], Any], device: torch.device) -> Chain:
    """The chain with most weights.

    Args:
        model: whole.
        forward: a pass of it.
        device: that it runs on.

    Raises:
        UsageError: there is none, there are two, or its layers draw random numbers.
    """
    name, modules, tensors = type(model).__name__, dict(model.named_modules()), dict(_tensors(model))
    inside = {layer: [*modules[layer].parameters(), *modules[layer].buffers()] for layer in modules}
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)}
    trace = _traced(
        model,
        forward,
        device,
        [f"{name}.{key}".lstrip(".") for name in lists for key, _ in lists[name].named_children()],
    )
    sizes = {layer: sum(each.numel() for each in modules[layer].parameters()) for layer in modules}
    runs = sorted(_runs(lists, trace.calls), key=lambda run: -sum(sizes[call.name] for call in run))
    if not runs:
        why = "has no list of layers of which each gets what the one before it gave, of the same shape"
        if number := max(Counter(call.name for call in trace.calls).values(), default=1) - 1:
            why = f"calls a layer {number + 1} times in a pass of forward_step"
        raise UsageError(f"{name} {why}", FSDP2)
    run, own = runs[0], sum(sizes[call.name] for call in runs[0])
    for other in runs[1:]:
        is_inside = any(f"{other[0].name}.".startswith(f"{call.name}.") for call in run)
        if 2 * sum(sizes[call.name] for call in other) > own and not is_inside:
            ends = [each[0].name.rpartition(".")[0] for each in (run, other)]
            raise UsageError(f"{name} has two chains of layers, {ends[0]} and {ends[1]}; a pipeline cuts one", FSDP2)
    if run[0].state != run[-1].state_after:
        raise UsageError(
            f"the layers of {name} draw random numbers, as dropout does, and a pipeline divides their chain: set "
            f"dropout to 0, or {FSDP2}"
        )
    layers = [call.name for call in run]
    starts = [call.began for call in run]

    def place(clock: int) -> int:
        return len(run) if clock >= run[-1].ended else sum(start <= clock for start in starts) - 1

    uses = {each: {place(clock) for clock in trace.used.get(each, ())} for each in trace.names.values()}
    for number, layer in enumerate(layers):
        for tensor in inside[layer]:
            uses[trace.names[tensor]].add(number)
    for weight in _beside_hidden_states(modules[layers[0]], forward):
        if uses.get(trace.names.get(weight, "")) == {-1}:  # such as a table of positions that all layers get
            uses[trace.names[weight]] |= {*range(len(layers))}
    outputs = {call.name: len(call.output) if isinstance(call.output, tuple) else 0 for call in run}
    return Chain(layers, outputs, {key: frozenset(uses[trace.names[tensor]]) for key, tensor in tensors.items()})


def _beside_hidden_states(first: nn.Module, forward: Callable[[], Any]) -> Iterable[Tensor]:
    """The weights on which a pass depends, if those that layer `first` gets as hidden states count for nothing."""

    def cut(layer: nn.Module, args: Any, named: Any) -> tuple[Any, Any]:
        hidden = hidden_states(args, named)
        return tree_map(lambda each: each.detach() if each is hidden else each, (args, named))

    hook = first.register_forward_pre_hook(cut, prepend=True, with_kwargs=True)
    with torch.enable_grad():
        result = forward()
    hook.remove()
    return used_weights([each for each in tree_leaves(result) if isinstance(each, Tensor)]) or ()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _traced(model: nn.Module, forward: Callable[[], Any], device: torch.device, layers: Sequence[str]) -> _Trace:
    """The trace of a pass that notes the calls of these layers."""
    names: dict[Tensor, str] = {}
    for name, tensor in _tensors(model):
        names.setdefault(tensor, name)
    trace, hooks, open_calls = _Trace(names), [], list[_Call]()

    def enter(name: str, args: Any, named: Any) -> None:
        trace.clock += 1
        open_calls.append(_Call(name, hidden_states(args, named), trace.clock, generator_states(device)))
        trace.calls.append(open_calls[-1])

    def leave(output: Any) -> None:
        trace.clock += 1
        call = open_calls.pop()
        call.ended, call.state_after, call.output = trace.clock, generator_states(device), output

    for name in layers:
        layer = model.get_submodule(name)
        # First and last of all hooks: those of the user belong to the layer.
        hooks.append(
            layer.register_forward_pre_hook(
                lambda layer, args, named, name=name: enter(name, args, named), prepend=True, with_kwargs=True
            )
        )
        hooks.append(layer.register_forward_hook(lambda layer, args, output: leave(output)))
    try:
        with trace:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _runs(lists: Mapping[str, nn.Module], calls: Sequence[_Call]) -> Iterator[list[_Call]]:
    """The runs of neighbours in a list that are called once each and pass their hidden states on as they are."""
    number = Counter(call.name for call in calls)
    found = {call.name: call for call in calls if number[call.name] == 1 and call.keeps_shape}
    for name, members in lists.items():
        own = [found.get(f"{name}.{key}".lstrip(".")) for key, _ in members.named_children()]
        group, keys = 0, list[int]()
        for before, call in zip([None, *own], own):
            group += before is None or call is None or call.given is not before.hidden
            keys.append(group)
        for _, run in groupby(zip(keys, own), key=lambda pair: pair[0]):
            members_of_run = [call for _, call in run if call is not None]
            if len(members_of_run) > 1:
                yield members_of_run
