"""Cuts the chain of layers of a model into stages, by passes in one process before the run.

1. A pass finds the chain: layers that each get exactly the hidden states that the one before returned.
2. A traced pass finds which weights each stage needs.
3. A rehearsal plays the part of each stage: with the whole model's hidden states, it must return the same result.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..alone.passes import Forward, OperationTrace, device_for_passes, is_same, passes_alone
from ..errors import UsageError
from ..failure import line_of
from ..seeds import generator_states
from ..step.setup import Setup
from ..weights.on_disk import origin_of
from .absent import FALLBACK
from .schedules import SCHEDULES
from .stages import Cut, Stage, draws, entry_of, hidden_states, leave_before_layers

NOISE = 0.02  # added to the weights in the rehearsal


def cut_of(setup: Setup) -> Cut:
    """The cut of a setup's model, after each stage has given the same result as the whole model. The model, and
    everything that `forward_step` refers to, is unchanged afterwards. Raises UsageError if the model cannot be cut into
    its stages, or a stage needs more than hidden states."""
    device, model, name = device_for_passes(setup), setup.model, type(setup.model).__name__
    cut, ends = find_cut(setup, _alone, partial(generator_states, device))
    with _alone(setup) as forward:
        leave_before_layers(forward, entry_of(model, cut.chain, device), is_entry=True)
    for index, expected in enumerate(ends):
        with _alone(setup) as forward:
            stage = Stage(model, cut, index, device)
            stage.run = forward
            stage.name_all()
            try:
                found = tree_leaves(_detached(stage(ends[index - 1] if index else torch.empty(0))))
                fits, why = all(is_same(*pair) for pair in zip(found, tree_leaves(expected), strict=True)), ""
            except Exception as error:  # for example, a layer of another stage does not return it
                fits, why = False, f" ({line_of(error)})"
            if not fits:
                raise UsageError(
                    f"{name} cannot be cut into stages: {[*cut.chain][cut.bounds[index]]} and later layers, or code "
                    f"after them, need more than the hidden states of the layer before{why}",
                    f"use {FALLBACK}",
                )
    return cut


def find_cut(
    setup: Setup, passes: Callable[[Setup], AbstractContextManager[Forward]], states: Callable[[], Any]
) -> tuple[Cut, list[Any]]:
    """A cut without a rehearsal, and the other result of `cut_chain`. Raises UsageError if the model has no chain with
    at least a layer per stage. `passes` yields a pass in a `with` block; `states` gets the generators' states."""
    model, size = setup.model, setup.plan.layout.pp
    num_stages = size * SCHEDULES[setup.plan.config.pipeline_schedule].per_process
    with passes(setup) as forward:
        chain, left = find_chain(model, forward, states)
    if len(chain) < num_stages:
        most = len(chain) * size // num_stages
        raise UsageError(
            f"{len(chain)} layers of {type(model).__name__} are fewer than {num_stages} stages",
            f"use --pipeline_stages {most} or less" if most > 1 else "use --pipeline_schedule 1f1b",
        )
    with passes(setup) as forward:
        cut, ends = cut_chain(model, chain, num_stages, forward)
    return replace(cut, left=frozenset(left)), ends


@dataclass
class _Call:
    """A call of a layer in a list: the hidden states that it got and returned, how many values it returned as a tuple,
    the random generators before and after it, and the attributes that it set in its modules."""

    name: str
    given: Any
    state: Any
    hidden: Any = None
    num_outputs: int = 0
    state_after: Any = None
    left: Sequence[str] = ()

    @property
    def keeps_shape(self) -> bool:
        values = self.given, self.hidden
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        return len(tensors) == 2 and tensors[0].shape == tensors[1].shape and tensors[0].dtype == tensors[1].dtype


def find_chain(model: nn.Module, forward: Forward, states: Callable[[], Any]) -> tuple[dict[str, int], list[str]]:
    """The chain with the most weights: layers that each get the hidden states of the one before, all of one
    shape and type. Raises UsageError if there is none, there are two, or its layers draw random numbers. Hooks stay on
    the model. `states`: returns the states of the random generators. Returns {layer: how many values it returns as a
    tuple, with the hidden states first; 0: the hidden states}, in the order of the pass; and the attributes that layers
    set."""
    name, modules = type(model).__name__, dict(model.named_modules())
    lists = {
        name: [f"{name}.{key}".lstrip(".") for key, _ in module.named_children()]
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    calls = _calls(model, [layer for layers in lists.values() for layer in layers], states)
    forward(model)

    def size(run: Sequence[_Call]) -> int:
        return sum(weight.numel() for call in run for weight in model.get_submodule(call.name).parameters())

    if not (runs := sorted((run for run in _runs(lists.values(), calls) if len(run) > 1), key=size, reverse=True)):
        why = "has no list of layers where each gets the output of the one before, of the same shape"
        if number := max(Counter(call.name for call in calls).values(), default=1) - 1:
            why = f"calls a layer {number + 1} times in a pass of forward_step"
        raise UsageError(f"{name} {why}", f"use {FALLBACK}")
    run, *others = runs
    for other in others:
        is_inside = any(f"{other[0].name}.".startswith(f"{call.name}.") for call in run)
        if 2 * size(other) > size(run) and not is_inside:
            ends = [each[0].name.rpartition(".")[0] for each in (run, other)]
            raise UsageError(
                f"{name} has two chains of layers, {ends[0]} and {ends[1]}; a pipeline cuts one", f"use {FALLBACK}"
            )
    if run[0].state != run[-1].state_after:
        raise draws(name)
    return {call.name: call.num_outputs for call in run}, [each for call in run for each in call.left]


def _calls(model: nn.Module, layers: Sequence[str], states: Callable[[], Any]) -> list[_Call]:
    """A list that a pass will fill with the calls of these layers."""
    calls, running = list[_Call](), list[tuple[_Call, dict[str, dict]]]()

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        call, before = running.pop()
        call.left = [
            f"{call.name}.{path}.{key}".replace("..", ".")
            for path, module in layer.named_modules()
            for key, value in vars(module).items()
            if value is not before[path].get(key) and not isinstance(value, bool | dict)
        ]
        call.num_outputs = len(output) if isinstance(output, tuple) else 0
        call.hidden, call.state_after = output[0] if call.num_outputs else output, states()

    for name in layers:

        def enter(layer: nn.Module, args: Any, named: Any, name: str = name) -> None:
            calls.append(_Call(name, hidden_states(*args, **named), states()))
            running.append((calls[-1], {path: dict(vars(module)) for path, module in layer.named_modules()}))

        # These are the first and the last hooks: the user's hooks belong to the layer.
        model.get_submodule(name).register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        model.get_submodule(name).register_forward_hook(leave)
    return calls


def _runs(lists: Iterable[Sequence[str]], calls: Sequence[_Call]) -> Iterator[list[_Call]]:
    """The runs of neighbours in a list that are called once each and pass their hidden states on unchanged."""
    number = Counter(call.name for call in calls)
    found = {call.name: call for call in calls if number[call.name] == 1 and call.keeps_shape}
    for layers in lists:
        run: list[_Call] = []
        for call in map(found.get, layers):
            if run and (call is None or call.given is not run[-1].hidden):
                yield run
                run = []
            run = run if call is None else [*run, call]
        yield run


def layer_bounds(num_layers: int, num_stages: int) -> list[int]:
    """The bounds of stages of about equal length; the last stage, which has the head, gets no extra layer."""
    return [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]


def cut_chain(model: nn.Module, chain: Mapping[str, int], num_stages: int, forward: Forward) -> tuple[Cut, list[Any]]:
    """Cuts a model so that a stage holds the weights that its part of a pass uses. These include all that the part
    depends on apart from the hidden states that it gets, such as a table of positions that all layers get. Hooks stay
    on the model. Returns the cut, and for each stage the hidden states that the next one gets; for the last one what
    the pass returns. `num_stages`: at most the number of layers."""
    bounds, layers, ends = layer_bounds(len(chain), num_stages), [*map(model.get_submodule, chain)], list[Any]()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    stages: dict[Tensor, set[int]] = {tensor: set() for tensor in tensors.values()}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for tensor in (each for layer in layers[start:stop] for each in (*layer.parameters(), *layer.buffers())):
            stages[tensor].add(stage)

    trace = OperationTrace()
    for tensor in stages:
        trace.origins[tensor] = frozenset([tensor])

    def end(result: Any) -> None:
        ends.append(_detached(result))
        for tensor in trace.used:
            stages[tensor].add(len(ends) - 1)
        trace.used.clear()

    def begin(layer: nn.Module, args: Any, named: Any) -> tuple[Any, Any]:
        hidden = hidden_states(*args, **named)
        copy = hidden.detach().clone()  # a model may add to it in place
        trace.origins[copy] = frozenset()
        end(hidden)
        return tree_map(lambda each: copy if each is hidden else each, (args, named))

    def leave(layer: nn.Module, args: Any, output: Any) -> None:  # later code may use it, too, as a skip connection
        trace.origins[output[0] if isinstance(output, tuple) else output] = frozenset()

    for bound in bounds[1:-1]:
        layers[bound - 1].register_forward_hook(leave)
        layers[bound].register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
    with trace:
        end(forward(model))
    untouched = {name for name, weight in model.named_parameters(remove_duplicate=False) if not stages[weight]}
    everywhere = dict.fromkeys(untouched, range(num_stages))
    stages_of = {name: frozenset(stages[each] or everywhere.get(name, {0})) for name, each in tensors.items()}
    firsts = {weight: name for name, weight in model.named_parameters()}
    first_names = {name: firsts[weight] for name, weight in model.named_parameters(remove_duplicate=False)}
    return Cut(chain, bounds, stages_of, frozenset(untouched), first_names), ends


@contextmanager
def _alone(setup: Setup) -> Iterator[Forward]:
    """`passes_alone`, with noise added to the weights: zeros, as in new adapters, would hide what depends on them."""
    in_memory = [weight for weight in setup.model.parameters() if origin_of(weight) is None]  # others become random
    with passes_alone(setup) as forward:
        generators: dict[torch.device, torch.Generator] = {}
        for weight in in_memory:  # drawn on their device: a billion numbers take 8 s on a core
            generator = generators.setdefault(weight.device, torch.Generator(weight.device).manual_seed(0))
            weight.add_((torch.randn(weight.shape, generator=generator, device=weight.device) * NOISE).to(weight))
        yield forward


def _detached(value: Any) -> Any:
    """Drops the graph: while one is alive, a weight whose place another tensor takes cannot be restored."""
    return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, value)
