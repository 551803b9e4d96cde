"""Watches the operations between layers that tensor parallelism divides: later passes may not add others."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..alone.passes import OperationTrace
from ..data.sets import Batch, NumberedStep
from ..errors import UsageError
from ..seeds import generator_states
from ..step.engine import Engine
from .tensor_plan import ENDS, NORM_OF_HEADS, PACKED

Origins = frozenset[str]  # the operations, and layers, that a tensor comes from


class Operations(OperationTrace):
    """Records in `found` the operations on outputs of divided layers, except elementwise ones on only these."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self._inside, self._is_training = set[str](), 0, torch.is_grad_enabled()
        # Operations over the units of a layer, such as a norm: a process has too few. And layers that use one.
        self._mixed, self.wrong = set[str](), set[str]()

    def note(self, what: str, values: Any) -> None:
        """Records that something takes these values, if they come from divided layers."""
        origins = self.of(tree_leaves(values))
        self.found |= {f"{what} of {' and '.join(sorted(origins))}"} if origins else set()

    @contextmanager
    def watch(self, modules: Iterable[tuple[str, nn.Module]], styles: Mapping[str, str]) -> Iterator[None]:
        """Watches a pass of these modules, which a plan divides."""
        kinds = {name: style for name, style in styles.items() if style in (*ENDS, *PACKED, NORM_OF_HEADS)}
        with ExitStack() as stack:
            for name, module in modules:
                if name in kinds:
                    is_column = kinds[name] in PACKED or ENDS.get(kinds[name], ("", "sum"))[1] == "keep"
                    leave = partial(self._leave, name, is_column, kinds[name] == NORM_OF_HEADS)
                    stack.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(leave, with_kwargs=True, prepend=True))
            stack.enter_context(self)
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, named: Any) -> None:
        self.note(name, (args, named))
        self.wrong |= {name for each in self.of(tree_leaves((args, named))) if any(one in each for one in self._mixed)}
        self._inside += 1

    def _leave(self, name: str, is_column: bool, is_norm: bool, _: Any, args: Any, named: Any, output: Any) -> None:
        self._inside -= 1
        self.mark(output, self.of(tree_leaves((args, named))) if is_norm else Origins([name] * is_column))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, given = function._schema, [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # A collective, in the backward pass of a column, returns whole values.
        if self._inside or function.namespace == "_c10d_functional" or not (origins := self.of(given)):
            return function(*args, **(kwargs or {}))
        may_draw = torch.Tag.nondeterministic_seeded in function.tags  # attention does only if it has dropout
        states = generator_states(given[0].device) if may_draw else None
        result = function(*args, **(kwargs or {}))
        if may_draw and generator_states(given[0].device) != states:
            raise UsageError(
                "something between two layers of the tp_plan draws random numbers "
                f"({schema.name.removeprefix('aten::')}), and each process would draw them for its own features",
                "remove it, or use --config_file accelerate_configs/fsdp2.yaml",
            )
        if self._is_training and not torch.is_grad_enabled():  # in an autograd.Function: its backward pass is not seen
            self.note(f"{schema.name.removeprefix('aten::')} without gradients", (args, kwargs))
        is_view = any(each.alias_info is not None for each in schema.returns) or schema.name == "aten::_to_copy"
        last = lambda each: (*each.shape[-1:], *each.stride()[-1:]) if isinstance(each, Tensor) else None  # noqa: E731
        if torch.Tag.pointwise not in function.tags and not (is_view and last(result) == last(given[0])):
            named = dict(zip((each.name for each in schema.arguments), args)) | (kwargs or {})
            dims = [each for each in schema.arguments if each.name.startswith("dim")]
            numbers = [named.get(each.name, each.default_value) for each in dims]
            is_plain = not any("(" in each for each in origins)
            is_last = bool({-1, given[0].ndim - 1} & {*tree_leaves(numbers)}) or "normalized_shape" in named
            if is_over_units := is_plain and is_last:
                numbers = [each for each in tree_leaves(args) if type(each) is int]  # a slice of other units is another
            is_total = is_plain and isinstance(result, Tensor) and result.numel() == 1 < given[0].numel()
            name = f"{schema.name.removeprefix('aten::')}{numbers or ''}"
            name = "attention" if "scaled_dot_product" in name else name  # kernels differ with the mask and the device
            self.note(name, (args, kwargs))
            again = [origin for origin in origins if origin.startswith(f"{name}(")]  # as a cache grows token by token
            origins = Origins(again or [f"{name}({', '.join(sorted(origins))})"])
            self._mixed |= origins if (is_over_units or is_total) and not is_view else set()
        elif not all("(" in each for each in origins) and any(
            each.shape[-1:] == result.shape[-1:] > (1,) and each not in self.origins for each in given
        ):  # what a transpose returns may have another last dimension: T5's biases have keys there
            self.note(f"{schema.name.removeprefix('aten::')} with another tensor", (args, kwargs))
        self.mark((result, args[:1] if schema.is_mutable else ()), origins)
        return result


def watched(engine: Engine, styles: Mapping[str, str]) -> NumberedStep:
    """The `forward_step` of an engine; it raises UsageError if a pass draws random numbers or computes more between
    divided layers than the first steps did. It watches passes of steps whose result is read, the first pass after each
    step in an evaluation (on a CPU all), and passes with new shapes; others for draws. `styles`: of a plan, if any."""
    forward_step, plan, last = engine.forward_step, engine.plan, [(True, -1)]
    first = dict[bool, int]()  # {whether a pass has gradients: number of the first step with such a pass}
    known, seen, draws = {True: set[str](), False: set[str]()}, set[Any](), set[bool]()

    def step(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        is_training, states = torch.is_grad_enabled(), generator_states(engine.device)
        is_first = number < first.setdefault(is_training, number) + max(1, plan.config.check_steps)
        values = passed(model, batch, number, is_training, is_first)
        if generator_states(engine.device) != states and is_training not in draws:
            if not is_first:
                raise UsageError(
                    f"a pass draws random numbers in step {number + 1}, such as dropout, but the first steps' passes "
                    f"do not; {plan.layout} divides it",
                    "set dropout to 0, or use --config_file accelerate_configs/fsdp2.yaml",
                )
            draws.add(is_training)
        return values

    def passed(model: Any, batch: Batch, number: int, is_training: bool, is_first: bool) -> dict[str, Tensor]:
        key = (is_training, *((name, value.shape) for name, value in batch.items() if isinstance(value, Tensor)))
        is_read = plan.reads(number + 1) if is_training else plan.layout.device == "cpu" or (False, number) != last[0]
        if not (styles and (is_read or key not in seen or is_first)):
            return forward_step(model, batch, number)
        seen.add(key)
        last[0], operations, values = (is_training, number), Operations(), dict[str, Tensor]()
        try:
            with operations.watch(engine.running_modules(), styles):
                values = forward_step(model, batch, number)
        finally:  # also where a stage of a pipeline is left
            found = {each for each in operations.found if each.partition(" of ")[0] not in operations.wrong}
            known[is_training] |= found if is_first else set()
            operations.note("the values of forward_step", values)  # never right, unless something multiplies them by 0
            for new in sorted(operations.found - known[is_training]):
                raise UsageError(
                    f"in step {number + 1} a pass computes {shorten(new, 160)}, and {plan.layout} divides that "
                    f"among processes{'' if is_first else '; the first steps do not compute it'}",
                    "use --config_file accelerate_configs/fsdp2.yaml",
                )
        return values

    return step
