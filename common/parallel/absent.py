"""Placeholders for the weights of other pipeline stages, and for tensors computed from them."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..alone.passes import TAKES_SHAPE
from ..errors import UsageError

FALLBACK = "--config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"  # for a model that cannot be cut
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # of operations that ask for values


class Absent(Tensor):
    """A tensor that was computed from the weights of another stage. Before its first layer, a stage computes with
    such tensors, and drops the results. Branching on one, or writing it to another tensor, raises UsageError."""

    origin: str
    numbers: Tensor
    is_trained = True  # whether the weight that it stands for has requires_grad
    twin: Tensor | None = None  # the weight, if another stage of this process has it
    home: Any = None  # the stage with whose model it is
    _is_param = False  # for `isinstance(weight, nn.Parameter)`
    in_front = False  # whether a pass has not reached the layers of its stage: then it may write what is dropped

    @staticmethod
    def __new__(cls: Any, like: Tensor, name: str, values: Tensor | None = None) -> "Absent":
        self = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=like.device
        )
        nothing = torch.nan if like.is_floating_point() or like.is_complex() else 0
        if values is None:
            values = torch.full((), nothing, dtype=like.dtype, device=like.device).expand(like.shape)
        self.origin, self.numbers = name, values
        return self

    @classmethod
    def weight(cls, weight: Tensor, name: str, device: torch.device, dtype: torch.dtype | None = None) -> "Absent":
        self: Any = cls(torch.empty((), dtype=dtype or weight.dtype, device=device).expand(weight.shape), name)
        self._is_param, self.is_trained = True, weight.requires_grad
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Absent)]
        if any(each.twin is not None and each.home.running is None for each in given):  # outside of passes
            of_twin = lambda each: each if each.twin is None else each.twin  # noqa: E731
            args, kwargs = tree_map_only(Absent, of_twin, (args, kwargs or {}))
            return function(*args, **kwargs)
        if READS & {*function.tags}:
            raise given[0].refusal(f"branches on {given[0].origin}, or a value computed from it")
        written = args[0] if function._schema.is_mutable and args else None
        if isinstance(written, Absent) and function._schema.name.endswith("_"):
            if written.twin is not None and written.home.running is not written.home:
                raise written.refusal(f"writes {written.origin}, but not of the model that forward_step is given,")
            return written  # there is nothing to write
        if written is not None and not cls.in_front:
            raise given[0].refusal(f"writes a value computed from {given[0].origin} into another tensor")
        numbers, named = tree_map_only(Absent, lambda each: each.numbers, (args, kwargs or {}))
        result = function(*numbers, **named)
        if TAKES_SHAPE.search(function._schema.name):
            return result
        own = {id(each) for each in tree_leaves((args, kwargs))}
        return tree_map_only(Tensor, lambda each: each if id(each) in own else cls(each, given[0].origin, each), result)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{self.origin} (of another stage)"

    @property
    def grad(self) -> Any:
        """Also absent, like the weight: a norm of all gradients needs it."""
        return Absent(self, self.origin, self.numbers) if self.twin is None else self.twin.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if self.twin is not None:
            self.twin.grad = value

    @property
    def requires_grad(self) -> bool:
        """The weight's own value: a penalty may leave out frozen weights."""
        return self.is_trained

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> "Absent":
        if requires_grad != self.is_trained and self._is_param:
            raise self.refusal(f"changes requires_grad of {self.origin} after fit began")
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        raise self.refusal(f"copies {self.origin}")

    def refusal(self, what: str) -> UsageError:
        return UsageError(
            f"forward_step, the model or a hook {what}: another stage of the pipeline has that", f"use {FALLBACK}"
        )


def refuse_absent(values: Any, what: str) -> None:
    """Raises UsageError if one of these values was computed from weights of another stage."""
    for each in tree_leaves(values):
        if isinstance(each, Absent):
            raise each.refusal(f"computes {what} from {each.origin}, besides the hidden states")


def in_front(is_front: bool) -> AbstractContextManager[Any]:
    """Whether the pass in the `with` block begins in front of the layers of its stage."""
    return patch.object(Absent, "in_front", is_front)
