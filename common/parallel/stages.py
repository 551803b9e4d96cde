"""A stage of a pipeline runs the recipe's own forward_step: its first layer gets the hidden states that the stage
before it sent, and the pass is left before the first layer of the next stage."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..data.sets import Batch, NumberedStep
from ..errors import UsageError

FALLBACK = "--config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"  # of a model that cannot be cut
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")

Run = Callable[[nn.Module], Any]  # a pass of forward_step, with a model


@dataclass(frozen=True)
class Cut:
    """A chain of layers, cut into stages.

    Attributes:
        chain: {layer: how many values it returns as a tuple}, from `find_chain`.
        bounds: stage s holds layers bounds[s] to bounds[s + 1] - 1.
        stages_of: {parameter or buffer: the stages that hold it}, under all names.
        untouched: parameters that no layer has and the passes did not use. All stages hold them: a pass with other
            samples, or an evaluation, may use them anywhere.
    """

    chain: Mapping[str, int]
    bounds: Sequence[int]
    stages_of: Mapping[str, frozenset[int]]
    untouched: frozenset[str]


def hidden_states(*args: Any, **named: Any) -> Any:
    """What a layer of a chain gets from the one before it: its first argument."""
    return args[0] if args else next(iter(named.values()), None)


class _Left(BaseException):  # no Exception: a recipe may catch those
    """Ends a pass before a layer, with the hidden states that this layer got."""


def _leave(*args: Any, **named: Any) -> Tensor:
    raise _Left(hidden_states(*args, **named))


def leave_before_layers(run: Run, model: nn.Module) -> Tensor:
    """The hidden states with which a pass comes to the layers after those of a stage or an entry."""
    try:
        run(model)
    except _Left as left:
        return left.args[0]
    raise UsageError(
        f"{type(model).__name__} cannot be cut into stages: a pass of forward_step ends before the last layers, or a "
        "function that a copy of it calls refers to the model itself",
        f"use {FALLBACK}",
    )


class _StageOnly(TorchDispatchMode):
    """Refuses collectives with processes of other stages, which take other passes: all would wait for ever."""

    def __init__(self, ranks: Collection[int]):
        super().__init__()
        self._ranks = {*ranks}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            objects = zip(function._schema.arguments, args)
            (group,) = (each for argument, each in objects if "ProcessGroup" in str(argument.type))
            if not self._ranks.issuperset(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))):
                raise UsageError(
                    "forward_step calls a collective of all processes, and those of other stages do not call it: "
                    f"return the values, as metrics, whose means are of all processes, or use {FALLBACK}"
                )
        return function(*args, **(kwargs or {}))


def in_one_stage(forward_step: NumberedStep, ranks: Collection[int]) -> NumberedStep:
    """A `forward_step` whose first pass in training and in evaluation raises UsageError if it exchanges values with
    others than these processes, which have the same stages."""
    seen = set[bool]()

    def first_passes_watched(model: Any, batch: Batch, number: int) -> Any:
        if torch.is_grad_enabled() in seen:
            return forward_step(model, batch, number)
        seen.add(torch.is_grad_enabled())
        with _StageOnly(ranks):
            return forward_step(model, batch, number)

    return first_passes_watched


class Stage(nn.Module):
    """A range of the layers of a model, and what runs before or after all of them.

    Layers of other stages keep their place and class and lose their weights. Those before this stage pass on the hidden
    states, and the last of them gives what `forward` got; that after it ends the pass. In front of the first layer, the
    weights of other stages are zeros, which take no memory: their results are replaced.

    Args:
        model: whole; changed in place.
        cut: of the model.
        index: of this stage.
        device: for the zeros.

    Attributes:
        run: a pass of `forward_step`, with the model.
        shape: shape and type of the hidden states that the next stage expects.
    """

    run: Run
    shape: tuple[torch.Size, torch.dtype] | None = None

    def __init__(self, model: nn.Module, cut: Cut, index: int, device: torch.device):
        super().__init__()
        self.model, self.is_last = model, index == len(cut.bounds) - 2
        layers = [*map(model.get_submodule, cut.chain)]
        start, stop = cut.bounds[index : index + 2]
        self.layers, self._received = layers[start:stop], torch.empty(0)
        for number, (layer, num_outputs) in enumerate(zip(layers, cut.chain.values())):
            if not start <= number < stop:
                forward = _leave if number >= stop else self._give if number == start - 1 else hidden_states
                _make_absent(layer, forward, num_outputs)
        for name, stages in cut.stages_of.items():
            if index not in stages:
                take_away(model, name, device)

    def forward(self, received: Tensor) -> Any:
        """What `run` returns for the model, in the last stage; in others the hidden states with which the pass leaves
        this stage. `received` are those with which it enters; the first stage needs none."""
        self._received = received
        if self.is_last:
            return self.run(self.model)
        hidden = leave_before_layers(self.run, self.model)
        if self.shape is None:
            return hidden
        shape, dtype = self.shape
        assert hidden.shape == shape, "each layer of the chain keeps the shape"
        return hidden.to(dtype).contiguous()

    def _give(self, *args: Any, **named: Any) -> Tensor:
        return self._received.clone()  # a layer may change it in place, which torch refuses of what it differentiates


def entry_of(
    model: nn.Module, chain: Mapping[str, int], device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """A copy of a model, of which a pass ends before the first layer: to find the shape of the hidden states. Its
    weights are zeros, which take no memory, and no process waits for another.

    Args:
        model: whole.
        chain: of the model.
        device: for the zeros.
        dtype: of the weights in a pass; None: their own.
    """
    entry = copied(model).eval()
    for module in entry.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                module._parameters[key] = nn.Parameter(_zeros(weight, device, dtype), requires_grad=False)

    def leave(layer: nn.Module, args: Any, named: Any) -> None:
        _leave(*args, **named)

    entry.get_submodule(next(iter(chain))).register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
    return entry


def is_absent(module: nn.Module) -> bool:
    """Whether another stage has this module."""
    return getattr(module, "_of_another_stage", False)


def _make_absent(layer: nn.Module, forward: Callable[..., Any], num_outputs: int) -> None:
    """Lets a layer give other hidden states, without the user's hooks, which belong to the stage that has it."""
    for module in layer.modules():
        module._of_another_stage = True  # type: ignore[assignment]
    for hooks in HOOKS:
        getattr(layer, hooks).clear()
    if hasattr(layer, "gradient_checkpointing"):  # of transformers: there is nothing to compute again
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    layer.forward = lambda *args, **named: (  # in the form in which the layer returned them
        (forward(*args, **named), *[None] * (num_outputs - 1)) if num_outputs else forward(*args, **named)
    )


def take_away(model: nn.Module, name: str, device: torch.device) -> None:
    """Replaces a weight by zeros that take no memory; a buffer stays, but is not saved."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    if key in module._buffers:
        module._non_persistent_buffers_set.add(key)
        return
    weight = module._parameters.pop(key)
    assert weight is not None
    vars(module)[key] = _zeros(weight, device)
    module._of_another_stage = not any(True for _ in module.parameters())  # type: ignore[assignment]


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, with the same weights, and buffers of its own: each stage changes those that it holds."""
    # Nor other tensors: a hook computes some anew in each pass, as the old weight norm does, which deepcopy refuses.
    others = [each for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *others)})


def _zeros(weight: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the shape of a weight, of which one element is in memory."""
    return torch.zeros((), dtype=dtype or weight.dtype, device=device).expand(weight.shape)
