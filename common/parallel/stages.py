"""A stage of a pipeline runs the recipe's own forward_step: its first layer gets the hidden states that the stage
before it sent, and the pass is left before the first layer of the next stage."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..alone.passes import passes_alone
from ..cpu_group import CpuGroup
from ..errors import UsageError
from ..failure import line_of
from ..step.setup import Setup
from ..weights.on_disk import origin_of
from .chain import FSDP2, Chain, find_chain, hidden_states, layer_bounds

NOISE = 0.02  # beside the weights in the rehearsal
TOLERANCE = 1e-4  # of what a stage gives in the rehearsal, relative to its largest element
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")


class _Left(BaseException):  # no Exception: a recipe may catch those
    """Ends a pass before a layer of another stage, with the hidden states that this layer got."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class Stage(nn.Module):
    """A range of the layers of a model, and what runs before or after all of them.

    Layers of other stages keep their place and class and lose their weights. Those before this stage pass on the hidden
    states, and the last of them gives what `forward` got; that after it ends the pass. In front of the first layer, the
    weights of other stages are zeros, which take no memory: their results are replaced.

    Args:
        model: whole; changed in place.
        chain: of the model.
        bounds: of the stages, from `layer_bounds`.
        index: of this stage.
        device: for the zeros.

    Attributes:
        run: a pass of `forward_step`, with the model.
        shape: shape and type of the hidden states that the next stage expects.
    """

    run: Callable[[nn.Module], Any]
    shape: tuple[torch.Size, torch.dtype] | None = None

    def __init__(self, model: nn.Module, chain: Chain, bounds: Sequence[int], index: int, device: torch.device):
        super().__init__()
        self.model, self.index = model, index
        self.is_first, self.is_last = index == 0, index == len(bounds) - 2
        self.layers = [model.get_submodule(name) for name in chain.layers[bounds[index] : bounds[index + 1]]]
        self._received = torch.empty(0)
        start, stop = bounds[index : index + 2]
        for number, name in enumerate(chain.layers):
            if not start <= number < stop:
                layer = model.get_submodule(name)
                forward = self._leave if number >= stop else self._give if number == start - 1 else hidden_states_of
                _make_absent(layer, forward, chain.outputs[name])
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in chain.uses:
            owner, _, key = name.rpartition(".")
            if index not in chain.stages_of(name, bounds):
                take_away(modules[owner], key, device)

    def forward(self, received: Tensor) -> Any:
        """What `run` returns for the model, in the last stage; in others the hidden states with which the pass leaves
        this stage. `received` are those with which it enters; the first stage needs none."""
        self._received = received
        try:
            result = self.run(self.model)
        except _Left as left:
            return self._as_expected(left.hidden)
        if not self.is_last:
            raise UsageError(
                f"a pass of forward_step ends before the last layers of {type(self.model).__name__}", FSDP2
            )
        return result

    def _as_expected(self, hidden: Tensor) -> Tensor:
        if self.shape is None:
            return hidden
        size, dtype = self.shape
        if hidden.shape != size:
            raise UsageError(
                f"hidden states have the shape {tuple(hidden.shape)} after stage {self.index}, and {tuple(size)} "
                "before the first layer",
                FSDP2,
            )
        return hidden.to(dtype).contiguous()

    def _give(self, *args: Any, **named: Any) -> Tensor:
        return self._received

    def _leave(self, *args: Any, **named: Any) -> Tensor:
        raise _Left(hidden_states(args, named))


class Entry(nn.Module):
    """Runs a pass up to the first layer, to find the shape of the hidden states. All weights are zeros, which take no
    memory, and no process waits for another.

    Args:
        model: whole; changed in place.
        chain: of the model.
        device: for the zeros.
        dtype: of the weights in a pass; None: their own.
    """

    def __init__(self, model: nn.Module, chain: Chain, device: torch.device, dtype: torch.dtype | None = None):
        super().__init__()
        self.model = model.eval()
        for module in model.modules():
            for key, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[key] = nn.Parameter(_zeros(weight, device, dtype), requires_grad=False)
        model.get_submodule(chain.layers[0]).register_forward_pre_hook(self._leave, prepend=True, with_kwargs=True)

    def forward(self, run: Callable[[nn.Module], Any]) -> Tensor:
        """The hidden states of a pass."""
        try:
            run(self.model)
        except _Left as left:
            return left.hidden
        raise UsageError(f"a pass of forward_step ends before the layers of {type(self.model).__name__}", FSDP2)

    def _leave(self, layer: nn.Module, args: Any, named: Any) -> None:
        raise _Left(hidden_states(args, named))


def hidden_states_of(*args: Any, **named: Any) -> Any:
    """A layer that passes on what it gets."""
    return hidden_states(args, named)


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


def take_away(module: nn.Module, key: str, device: torch.device) -> None:
    """Replaces a weight by zeros that take no memory; a buffer stays, but is not saved."""
    if key in module._buffers:
        module._non_persistent_buffers_set.add(key)
        return
    weight = module._parameters.pop(key)
    assert weight is not None
    vars(module)[key] = _zeros(weight, device)
    module._of_another_stage = not any(True for _ in module.parameters())  # type: ignore[assignment]


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, with the same weights and buffers."""
    shared: Any = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _zeros(weight: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the shape of a weight, of which one element is in memory."""
    return torch.zeros((), dtype=dtype or weight.dtype, device=device).expand(weight.shape)


def chain_of(setup: Setup, num_stages: int) -> Chain:
    """The chain of layers of the model of a setup, of which each stage has given what the whole model does. To be
    called in all processes: the main process looks for it. The model, and all that `forward_step` refers to, are
    afterwards as they were before.

    Raises:
        UsageError: the model cannot be cut into so many stages, or a stage needs more than hidden states.
    """
    found: Chain | UsageError | None = None
    if setup.accelerator.is_main_process:
        try:
            found = _find_and_rehearse(setup, num_stages)
        except UsageError as error:
            found = error
        except Exception as error:  # the run will show whether one process has it, too
            found = UsageError(f"{type(setup.model).__name__} cannot be cut into stages: {line_of(error)}", FSDP2)
    found = CpuGroup(setup.plan.config.hang_timeout).broadcast(found)
    if isinstance(found, UsageError):
        raise found
    assert found is not None
    return found


def _find_and_rehearse(setup: Setup, num_stages: int) -> Chain:
    device, name = setup.accelerator.device, type(setup.model).__name__
    with _alone(setup) as forward:
        chain = find_chain(setup.model, lambda: forward(setup.model), device)
    if len(chain.layers) < num_stages:
        most = len(chain.layers) * setup.plan.layout.pp // num_stages
        raise UsageError(
            f"{len(chain.layers)} layers of {name} are fewer than {num_stages} stages",
            f"use --pipeline_stages {most} or less" if most > 1 else "use --pipeline_schedule 1f1b",
        )
    with _alone(setup) as forward:
        try:
            Entry(copied(setup.model), chain, device)(forward)
        except UsageError:
            what = "a function that a copy of it calls refers to the model itself"
            raise UsageError(f"{name} cannot be cut into stages: {what}", FSDP2) from None
    bounds = layer_bounds(len(chain.layers), num_stages)
    with _alone(setup) as forward:
        given, expected = _hidden_states_at(setup.model, [chain.layers[bound] for bound in bounds[1:-1]], forward)
    for index in range(num_stages):
        with _alone(setup) as forward:
            stage = Stage(setup.model, chain, bounds, index, device)
            stage.run = forward
            found = stage(given[index - 1] if index else torch.empty(0))
            if not _are_same(found, expected if stage.is_last else given[index]):
                raise UsageError(
                    f"{name} cannot be cut into stages: layers from {chain.layers[bounds[index]]} on, or what comes "
                    "after them, need more than the hidden states of the layer before",
                    FSDP2,
                )
    return chain


@contextmanager
def _alone(setup: Setup) -> Iterator[Callable[[nn.Module], Any]]:
    """`passes_alone`, with noise beside the weights: zeros, as of new adapters, would hide what depends on them."""
    in_memory = [weight for weight in setup.model.parameters() if origin_of(weight) is None]  # others become random
    with passes_alone(setup) as forward:
        generator = torch.Generator().manual_seed(0)
        for weight in in_memory:
            noise = torch.randn(weight.shape, generator=generator) * NOISE
            weight.requires_grad_(weight.is_floating_point()).add_(noise.to(weight))
        yield forward


def _hidden_states_at(
    model: nn.Module, layers: Sequence[str], forward: Callable[[nn.Module], Any]
) -> tuple[list[Tensor], Any]:
    """What each of these layers gets in a pass, and what the pass returns."""
    given: list[Tensor] = []

    def note(layer: nn.Module, args: Any, named: Any) -> None:
        given.append(hidden_states(args, named).clone())  # a model may add to it in place

    for name in layers:
        model.get_submodule(name).register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    return given, forward(model)


def _are_same(found: Any, expected: Any) -> bool:
    """Whether two results of a pass are the same but for rounding errors."""
    pairs = [*zip(tree_leaves(found), tree_leaves(expected), strict=True)]
    return all(_is_same(*pair) for pair in pairs if isinstance(pair[0], Tensor))


def _is_same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or not found.is_floating_point():
        return torch.equal(found, expected)
    largest = expected.where(expected.isfinite(), 0).abs().max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0, atol=TOLERANCE * largest, equal_nan=True)
