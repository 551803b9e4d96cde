"""A stage of a pipeline runs the recipe's own forward_step: its first layer gets the hidden states that the stage
before it sent, and the pass ends before the first layer of the next stage."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..data.sets import Batch, NumberedStep
from ..errors import UsageError
from ..package import is_own
from ..seeds import generator_states
from ..step.guards import graph_of, leaves_of
from .absent import FALLBACK, Absent, in_front, refuse_absent

Run = Callable[[nn.Module], Any]  # a pass of forward_step, with a model


@dataclass(frozen=True)
class Cut:
    chain: Mapping[str, int]  # {layer: how many values it returns as a tuple}, from `find_chain`
    bounds: Sequence[int]  # stage s holds layers bounds[s] to bounds[s + 1] - 1
    stages_of: Mapping[str, frozenset[int]]  # {parameter or buffer: its stages}, under all names; all have extra states
    # Parameters of no layer that the passes did not use. All stages hold them: other passes may use them anywhere.
    untouched: frozenset[str]
    first_names: Mapping[str, str]  # {parameter: its first name}, under all names
    left: frozenset[str] = frozenset()  # attributes that layers of the chain set in a pass, such as for an extra loss


def hidden_states(*args: Any, **named: Any) -> Any:
    """The hidden states that a layer of a chain gets from the one before: its first argument."""
    return args[0] if args else next(iter(named.values()), None)


class _Left(BaseException):  # no Exception: a recipe may catch those
    """Ends a pass before a layer, with the hidden states that this layer got."""


def _leave(*args: Any, **named: Any) -> Tensor:
    raise _Left(hidden_states(*args, **named))


def leave_before_layers(run: Run, model: nn.Module, is_entry: bool = False) -> Tensor:
    """Runs a pass up to the layers after a stage, or after an entry. Returns the hidden states that reach them."""
    try:
        with in_front(Absent.in_front or is_entry):
            run(model)
    except _Left as left:
        return left.args[0]
    raise UsageError(
        f"{type(model).__name__} cannot be cut into stages: a pass of forward_step ends before the last layers, or a "
        "function that a copy of the model calls refers to the original model",
        f"use {FALLBACK}",
    )


class _StageOnly(TorchDispatchMode):
    """Refuses collectives with processes of other stages, which take different passes: all would wait forever."""

    def __init__(self, ranks: Collection[int]):
        super().__init__()
        self._ranks = {*ranks}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            objects = zip(function._schema.arguments, args)
            (group,) = (each for argument, each in objects if "ProcessGroup" in str(argument.type))
            if not self._ranks.issuperset(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))):
                raise UsageError(
                    "forward_step calls a collective of all processes, and other stages' processes do not call it: "
                    f"return the values as metrics, which are means over all processes, or use {FALLBACK}"
                )
        return function(*args, **(kwargs or {}))


def in_one_stage(forward_step: NumberedStep, ranks: Collection[int]) -> NumberedStep:
    """A `forward_step` whose first pass in training and in evaluation raises UsageError if it exchanges values with
    processes other than these, which have the same stages."""
    seen = set[bool]()

    def first_passes_watched(model: Any, batch: Batch, number: int) -> Any:
        is_first = torch.is_grad_enabled() not in seen
        seen.add(torch.is_grad_enabled())
        with _StageOnly(ranks) if is_first else nullcontext():
            return forward_step(model, batch, number)

    return first_passes_watched


class Stage(nn.Module):
    """A range of the layers of a model, and what runs before or after all of them.

    Layers of other stages keep their place and class and lose their weights. Layers before this stage return tensors
    without values, except the last of them, which returns what `forward` got; the layer after this stage ends the pass.
    Before the first layer, weights of other stages have no values either: the results are replaced. The model is
    changed in place.
    """

    run: Run
    shape: tuple[torch.Size, torch.dtype] | None = None  # of the hidden states that the next stage expects
    running: "Stage | None" = None  # of the stages of this process, the one whose pass began last; None: no pass runs
    _states: list[Any] | None = None  # of the generators, before the first layer of a pass
    _returned: tuple[Tensor, int] | None = None  # by the last layer, and the version
    others: Mapping[Tensor, str] = {}  # {weight of the other stage here: its name}, to look for in a pass

    def __init__(self, model: nn.Module, cut: Cut, index: int, device: torch.device):
        super().__init__()
        self.model, self.is_last = model, index == len(cut.bounds) - 2
        layers, names = [*map(model.get_submodule, cut.chain)], [*cut.chain]
        start, stop = cut.bounds[index : index + 2]
        self.layers, self._received, self._num_given, self._has_gradients = layers[start:stop], torch.empty(0), 0, False
        self._before, self._device = names[start - 1] if start else "", device
        self.layers[0].register_forward_pre_hook(self._before_layers, prepend=True)
        here = {module for layer in self.layers for module in layer.modules()}
        for number, (name, layer) in enumerate(zip(names, layers)):
            if not start <= number < stop:
                forward = _leave if number >= stop else self._give if number == start - 1 else partial(_nothing, name)
                _make_absent(name, layer, partial(self._in_its_pass, name, forward), cut, here, device)
        self._absent: list[tuple[dict[str, Any], str, Absent]] = []  # (a module's weights, a name, its placeholder)
        for name in (name for name, stages in cut.stages_of.items() if index not in stages):
            owner, _, key = name.rpartition(".")
            module = model.get_submodule(owner)
            if key in module._buffers:  # it stays, but is not saved
                module._non_persistent_buffers_set.add(key)
            elif (weight := module._parameters.pop(key, None)) is not None:  # not of a module with two names
                self._absent.append((module._parameters, key, Absent.weight(weight, name, device)))
                module._of_another_stage = not any(True for _ in module.parameters())  # type: ignore[assignment]

    def forward(self, received: Tensor) -> Any:
        """In the last stage, what `run` returns; in others, the hidden states with which the pass leaves this stage.
        `received`: those with which it enters, except in the first. Raises UsageError if the pass needs more."""
        self._received, self._num_given, self._has_gradients = received, 0, torch.is_grad_enabled()
        Stage.running, self._states, self._returned = self, None, None
        with in_front(bool(self._before)):
            values = self.run(self.model) if self.is_last else leave_before_layers(self.run, self.model)
        if self._returned is not None and (self._returned[0] is not values or self._returned[1] != values._version):
            raise _other_path("changes the hidden states between two layers")  # both stages would do it
        self._returned = None  # torch may exchange a tensor that nothing else refers to
        if self._before and self._num_given != 1:
            raise _other_path(f"calls {self._before} {self._num_given} times")
        if self.others and torch.is_grad_enabled():
            for weight in leaves_of(graph_of([values])) & self.others.keys():
                name = self.others[weight]
                raise Absent(weight, name).refusal(f"uses {name}, besides the hidden states")
        refuse_absent(values, "its values" if self.is_last else "the hidden states of the next stage")
        if self.is_last or self.shape is None:
            return values
        shape, dtype = self.shape
        assert values.shape == shape, "each layer of the chain keeps the shape"
        return values.to(dtype).contiguous()

    def _in_its_pass(self, name: str, forward: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        if Stage.running is not self:  # the recipe has the layer of another copy
            raise _other_path(f"calls {name} by itself")
        return forward(*args, **named)

    def name_all(self, here: Mapping[str, Tensor] = {}) -> None:
        """Puts placeholders where other stages' weights were, and watches the last layer's output, after all hooks.
        `here`: weights of all stages of this process."""
        self.layers[-1].register_forward_hook(self._after_layers)
        for weights, key, placeholder in self._absent:
            weights[key], placeholder.twin, placeholder.home = placeholder, here.get(placeholder.origin), self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights of this stage, which torch's schedules look for in the graph."""
        return (weight for weight in super().parameters(recurse) if not isinstance(weight, Absent))

    def _before_layers(self, *args: Any) -> None:
        self._states = generator_states(self._device)

    def _after_layers(self, layer: nn.Module, given: Any, output: Any) -> None:
        is_again = torch._C._current_graph_task_id() != -1  # activation checkpointing, in the backward pass
        if not is_again and self._states not in (None, generator_states(self._device)):
            raise draws(type(self.model).__name__)
        if not is_again and not self.is_last:
            hidden = output if isinstance(output, Tensor) else output[0]
            self._returned = None if hidden.is_inference() else (hidden, hidden._version)

    def _give(self, *args: Any, **named: Any) -> Tensor:
        Absent.in_front = False
        self._num_given += 1
        if torch.is_grad_enabled() != self._has_gradients:
            raise _other_path(f"calls {self._before} without a gradient")
        return self._received.clone()  # a layer may change it in place, which torch forbids for what it differentiates


def draws(name: str) -> UsageError:
    """The error for layers of this model that draw random numbers: a stage does not know what other stages drew."""
    return UsageError(
        f"the layers of {name} draw random numbers, such as dropout, and a pipeline divides their chain: set dropout "
        f"to 0, or use {FALLBACK}"
    )


def _other_path(what: str) -> UsageError:
    return UsageError(
        f"a pass of forward_step {what}, but the pipeline was cut by passes that call each layer once, on the "
        "output of the layer before",
        f"use {FALLBACK}",
    )


def _nothing(name: str, /, *args: Any, **named: Any) -> Absent:
    """Replaces a layer of an earlier stage, other than its last."""
    hidden = hidden_states(*args, **named)
    values = torch.full_like(hidden, torch.nan) if not isinstance(hidden, Absent) else hidden.numbers
    return Absent(hidden, name, values)


def entry_of(
    model: nn.Module, chain: Mapping[str, int], device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """A copy of a model whose pass ends before the first layer: to find the shape of the hidden states. Its weights
    have no values, and no process waits for another. `dtype`: of the weights in a pass; None: their own."""
    entry = copied(model).eval()
    for path, module in entry.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                module._parameters[key] = Absent.weight(weight, f"{path}.{key}".lstrip("."), device, dtype)

    entry.get_submodule(next(iter(chain)))._call_impl = _leave  # type: ignore[method-assign]
    return entry


def forward_hooks(models: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The dicts with the forward hooks of these models, and with the global ones."""
    modules = {module for model in models for module in model.modules()}
    found = [getattr(module, kind) for module in modules for kind in ("_forward_pre_hooks", "_forward_hooks")]
    return [*found, nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks]


def num_hooks(hooks: Iterable[dict[int, Any]]) -> int:
    """How many of these the recipe has registered."""
    functions = [getattr(hook, "func", hook) for each in hooks for hook in each.values()]
    codes = [getattr(each, "__code__", getattr(type(each).__call__, "__code__", None)) for each in functions]
    return sum(is_own(code.co_filename) for code in codes if code)  # transformers registers some in a first pass


def is_absent(module: nn.Module) -> bool:
    """Whether another stage has this module."""
    return getattr(module, "_of_another_stage", False)


def _make_absent(
    name: str, layer: nn.Module, forward: Callable[..., Any], cut: Cut, here: set[nn.Module], device: torch.device
) -> None:
    """Replaces the output of a layer. The user's hooks do not run here, but in the stage that has the layer. It may
    share modules with layers that are here. Its other modules lose what a pass would set: attributes from the first
    passes, and other numbers, which may be such attributes from the start, as `self.penalty = 0.0`."""
    num_outputs = cut.chain[name]
    for path, module in layer.named_modules():
        module._of_another_stage = module not in here
        prefix = f"{name}.{path}".rstrip(".")
        keys = [each.rpartition(".")[2] for each in cut.left if each.rpartition(".")[0] == prefix]
        keys += [key for key, value in vars(module).items() if type(value) is float]
        for key in keys if module not in here else ():
            vars(module)[key] = Absent(torch.empty((), device=device), f"{prefix}.{key}")
    if hasattr(layer, "gradient_checkpointing"):  # of transformers: there is nothing to compute again
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    layer._compiled_call_impl = None
    # Replaces `_call_impl`, not `forward`, around which hooks run. Returns the hidden states in the layer's form:
    layer._call_impl = lambda *args, **named: (  # type: ignore[method-assign]
        (forward(*args, **named), *[None] * (num_outputs - 1)) if num_outputs else forward(*args, **named)
    )


def copied(model: nn.Module, layers: Iterable[nn.Module] = ()) -> nn.Module:
    """A copy of a model, with the same weights, and its own buffers: each stage changes those that it holds. Only
    one stage runs each of the `layers`: those keep their buffers."""
    # Shares other tensors, too: hooks, such as the old weight norm's, compute some anew, and deepcopy refuses those.
    others = [each for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor)]
    others += [buffer for layer in layers for buffer in layer.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *others)})
