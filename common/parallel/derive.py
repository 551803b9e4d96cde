"""Derives how tensor parallelism divides a model that has no `tp_plan`, from passes of the recipe's own `forward_step`.

1. A trace finds pairs: linear layers ("columns") whose outputs go to other linear layers ("rows") alone, which get
   nothing else.
2. A rehearsal plays the part of each process, in this process: the columns give its share of random outputs, and the
   rows must get its share of what they get from all outputs. Everything else must stay as it is. Numbers of heads and
   widths that the modules around hold are divided until it fits.

Names and classes of models play no part. What mixes features, such as a norm, does not fit: its layers stay whole.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..alone.passes import passes_alone
from ..cpu_group import CpuGroup
from ..errors import UsageError
from ..failure import line_of
from ..step.setup import Setup
from .tensor_plan import NORM_OF_HEADS, NUMBER, can_pack, dims_of, is_linear, kind_of, why_no_plan

PACKS = (1, 3, 2)  # equal parts side by side in the outputs of a layer, of each of which a process takes its share
MIXED = "all features are needed"  # before or after a layer
OUTPUT = "the output"  # of the pass, among what a layer feeds
HEADS = re.compile(r"heads?$")  # of a number of heads
NO_WIDTH = re.compile(r"_features$|^nf$|head_(dim|size)$")  # numbers that no pass uses, or that stay

Call = tuple[str, int]  # the name of a layer, and how often it was called before in this pass
Forward = Callable[[], Any]


def derived_plan(setup: Setup) -> tuple[dict[str, str], dict[str, str]]:
    """What `derive` finds for the model of a setup. To be called in all processes: the main process derives it. The
    model, and all that `forward_step` refers to, are afterwards as they were before.

    Raises:
        UsageError: none of its layers can be divided, or `forward_step` fails.
    """
    plan, whole, why = dict[str, str](), dict[str, str](), ""
    if setup.accelerator.is_main_process:
        try:
            plan, whole = _derive_alone(setup)
            why = "no two linear layers follow each other without a layer between them that needs all features"
        except Exception as error:  # the run will show whether one process has it, too
            why = line_of(error)
    plan, whole, why = CpuGroup(setup.plan.config.hang_timeout).broadcast((plan, whole, why))
    if not plan:
        reason = f"{why_no_plan(setup.model)}, and none can be derived: {why}"
        raise UsageError(reason, "use --config_file accelerate_configs/fsdp2.yaml")
    return plan, whole


def _derive_alone(setup: Setup) -> tuple[dict[str, str], dict[str, str]]:
    model, layout = setup.model, setup.plan.layout
    with passes_alone(setup) as forward:
        return derive(model, lambda: forward(model), layout.tp, PACKS if can_pack(layout) else PACKS[:1])


def derive(
    model: nn.Module, forward: Forward, size: int, packs: Sequence[int] = PACKS
) -> tuple[dict[str, str], dict[str, str]]:
    """({module or number: style}, {linear layer: why it stays whole}).

    Args:
        model: whole. Its linear layers have the `forward` of their class.
        forward: a pass with the same samples and random numbers each time.
        size: number of processes that share a layer.
        packs: of `PACKS`; the first alone where `can_pack` is false.
    """
    passes, plan = _Passes(model, forward), dict[str, str]()
    whole = {name: "shared" if name in passes.shared else MIXED for name in passes.layers}
    for columns, rows in passes.pairs():
        # A layer between two others may be the row of one or the column of the other, not both.
        if columns | rows <= whole.keys() and (found := passes.rehearse(columns, rows, size, packs)):
            plan |= found
            whole = {name: why for name, why in whole.items() if name not in plan}
    return plan, whole


class _Trace(TorchDispatchMode):
    """Notes for each tensor from which layers and other weights it was computed, without passing another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.origins = WeakTensorKeyDictionary()

    def of(self, values: Any) -> frozenset[str]:
        return frozenset().union(*(self.origins.get(each, ()) for each in values if isinstance(each, Tensor)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if origins := self.of(given):
            written = given[:1] if function._schema.is_mutable else []
            for each in (*tree_leaves(result), *written):
                if isinstance(each, Tensor):
                    self.origins[each] = origins
        return result


class _Passes:
    """Passes of a model: one that is traced, and those in which the linear layers give what they are told.

    Attributes:
        layers: the linear ones, {name: layer}.
        shared: names of those that share a weight.
    """

    def __init__(self, model: nn.Module, forward: Forward):
        self._forward, self._modules = forward, dict(model.named_modules())
        self.layers = {name: module for name, module in self._modules.items() if is_linear(module)}
        owners = Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))
        self.shared = {
            name for name, layer in self.layers.items() if any(owners[each] > 1 for each in layer.parameters())
        }
        self._outputs: dict[Call, Tensor] = {}
        self._sources, self._consumers, self._between = ({name: set[str]() for name in self.layers} for _ in range(3))
        trace, of_layers = _Trace(), {weight for layer in self.layers.values() for weight in layer.parameters()}
        for name, weight in model.named_parameters():
            if weight not in of_layers:
                trace.origins[weight] = {name}

        def called(call: Call, given: Tensor, own: Callable[[], Tensor]) -> Tensor:
            name, output = call[0], own()
            for origin in () if isinstance(self.layers[name], nn.Embedding) else trace.of([given]):
                (self._sources if origin in self.layers else self._between)[name].add(origin)
            self._outputs[call] = output.clone()  # models add to it in place
            trace.origins[output] = {name}
            return output

        with self._calling(called), trace:
            results = self._forward()
        ends = dict.fromkeys([OUTPUT], trace.of(tree_leaves(results)) & self.layers.keys())
        for name, sources in (self._sources | ends).items():
            for source in sources:
                self._consumers[source].add(name)

    @contextmanager
    def _calling(self, called: Callable[[Call, Tensor, Callable[[], Tensor]], Tensor]) -> Iterator[None]:
        """Lets `called` (call, input, own forward) give the output of each linear layer in the `with` block."""
        number = Counter[str]()
        for name, layer in self.layers.items():

            def forward(*args: Any, name: str = name, own: Any = layer.forward, **named: Any) -> Tensor:
                number[name] += 1
                return called((name, number[name] - 1), (*args, *named.values())[0], lambda: own(*args, **named))

            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers.values():
                del layer.forward

    def pairs(self) -> list[tuple[set[str], set[str]]]:
        """(columns, rows), those with most weights first. What the columns give goes to the rows alone, which get
        nothing else. Layers of a kind are together: one may pass on to the next what depends on its heads."""
        found: dict[Any, tuple[set[str], set[str]]] = {}
        seen = set[str]()
        for start, sources in self._sources.items():
            rows, columns, before = {start}, set(sources), -1
            while before < len(rows) + len(columns) and OUTPUT not in rows:
                before = len(rows) + len(columns)
                rows = rows.union(*(self._consumers[column] for column in columns))
                columns = columns.union(*(self._sources[row] for row in rows - {OUTPUT}))
            if start in seen or not columns or OUTPUT in rows or columns & rows or (columns | rows) & self.shared:
                continue
            seen |= rows
            like = found.setdefault((*(frozenset(map(kind_of, end)) for end in (columns, rows)),), (set(), set()))
            if not (columns | rows) & (like[0] | like[1]):
                like[0].update(columns)
                like[1].update(rows)
        sizes = {name: layer.weight.numel() for name, layer in self.layers.items()}
        return sorted(found.values(), key=lambda pair: -sum(sizes[name] for name in pair[0] | pair[1]))

    def rehearse(self, columns: set[str], rows: set[str], size: int, packs: Sequence[int]) -> dict[str, str] | None:
        """{name: style} for these layers and what is between them; None if they cannot be divided."""
        between = {weight.rpartition(".")[0] for row in rows for weight in self._between[row]}
        if any(self._width(row, 1) % size for row in rows) or not all(
            _is_norm(self._modules[name]) for name in between
        ):
            return None
        # Not the outputs of the layers: those of a pretrained model may be zeros, which show nothing.
        generator, outputs = torch.Generator().manual_seed(0), dict(self._outputs)
        for call, output in self._outputs.items():
            if call[0] in columns:
                outputs[call] = output + torch.randn(output.shape, generator=generator).to(output)
        expected = self._replay(outputs.__getitem__)
        for number in packs:
            packed = {name: 1 if isinstance(self.layers[name], nn.Embedding) else number for name in columns}
            if any(self._width(name, 0) % (size * packed[name]) for name in columns):
                continue
            for numbers in self._numbers(packed, rows, size):
                try:
                    for process in range(size):
                        self._rehearse_process(process, size, outputs, expected, packed, rows, numbers)
                except Exception:  # most often a shape that does not fit
                    continue
                styles = {name: "colwise" if packed[name] == 1 else f"packed_colwise_{number}" for name in columns}
                styles |= dict.fromkeys(rows, "rowwise") | dict.fromkeys(between, NORM_OF_HEADS)
                return styles | dict.fromkeys(map(".".join, numbers), NUMBER)
        return None

    def _rehearse_process(
        self,
        process: int,
        size: int,
        outputs: Mapping[Call, Tensor],
        expected: Mapping[Call, Tensor],
        packed: Mapping[str, int],
        rows: set[str],
        numbers: Sequence[tuple[str, str]],
    ) -> None:
        """Raises an exception if this process would not get its share."""

        def share(value: Tensor, packs: int) -> Tensor:
            return torch.cat([pack.chunk(size, -1)[process] for pack in value.chunk(packs, -1)], -1)

        def give(call: Call) -> Tensor:
            return share(outputs[call], packed[call[0]]) if call[0] in packed else outputs[call]

        def take(call: Call, value: Any) -> None:
            if not _is_same(value, share(expected[call], 1) if call[0] in rows else expected[call]):
                raise ValueError(call)

        before = [(self._modules[name], key, getattr(self._modules[name], key)) for name, key in numbers]
        try:
            for module, key, value in before:
                setattr(module, key, value // size)
            if self._replay(give, take).keys() != expected.keys():
                raise ValueError(numbers)
        finally:
            for module, key, value in before:
                setattr(module, key, value)

    def _replay(
        self, give: Callable[[Call], Tensor], take: Callable[[Call, Any], None] = lambda call, value: None
    ) -> dict[Call, Any]:
        """A pass in which each layer gives what `give` says. Returns what each got, and the outputs of the pass."""
        taken: dict[Call, Any] = {}

        def called(call: Call, given: Any, own: Callable[[], Tensor] | None = None) -> Tensor:
            take(call, given)
            taken[call] = given.clone() if isinstance(given, Tensor) else given
            return given if own is None else give(call).clone()

        with self._calling(called):
            for index, value in enumerate(tree_leaves(self._forward())):
                called((OUTPUT, index), value)
        return taken

    def _width(self, name: str, end: int) -> int:
        """How many outputs (0) or inputs (1) a layer has."""
        return self.layers[name].weight.shape[dims_of(self.layers[name])[end]]

    def _numbers(self, packed: Mapping[str, int], rows: set[str], size: int) -> Iterator[list[tuple[str, str]]]:
        """Lists of (module, attribute) that may have to be divided, in the order in which they are tried."""
        yield []
        widths = {self._width(name, 0) // part for name, number in packed.items() for part in (1, number)}
        around = {name.rpartition(".")[0] for name in packed.keys() | rows}
        for _ in range(2):
            heads, sizes = list[tuple[str, str]](), list[tuple[str, str]]()
            for name in sorted(around - self.layers.keys()):
                for key, value in vars(self._modules[name]).items():
                    if type(value) is int and value and value % size == 0:
                        heads += [(name, key)] * bool(HEADS.search(key))
                        sizes += [(name, key)] * (value in widths and not NO_WIDTH.search(key))
            yield from filter(None, (heads, sizes, [*dict.fromkeys(heads + sizes)]))
            around |= {name.rpartition(".")[0] for name in around}


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has vectors alone, as a norm of the queries of each head."""
    return not [*module.children()] and all(weight.ndim == 1 for weight in module.parameters())


def _is_same(value: Any, expected: Any) -> bool:
    """Whether two values are the same but for rounding errors."""
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        return type(value) is type(expected)
    if value.shape != expected.shape or not value.is_floating_point():
        return torch.equal(value, expected)
    largest = expected.where(expected.isfinite(), 0).abs().max().item() if expected.numel() else 0.0
    tolerance = math.sqrt(torch.finfo(value.dtype).eps) * largest
    return torch.allclose(value, expected, rtol=0, atol=tolerance, equal_nan=True)
