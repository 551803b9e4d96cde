"""Derives how tensor parallelism divides a model without a `tp_plan` that fits, from passes of its `forward_step`.

1. A trace finds pairs: linear layers ("columns") whose outputs go only to other linear layers ("rows"), which get
   nothing else.
2. A rehearsal plays the part of each process, in this process: the columns return its share of random outputs, and the
   rows must get its share of what they get from all outputs. Everything else must stay the same. Numbers of heads and
   widths in the surrounding modules are divided until it fits.

Names and classes of models do not matter. Layers around something that mixes features, such as a norm, stay whole.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ..alone.passes import OperationTrace, is_same
from .tensor_plan import NORM_OF_HEADS, NUMBER, is_conv1d, is_linear, kind_of, shared_layers, width_of

PACKS = (1, 3, 2)  # equal parts side by side in a layer's outputs; a process takes its share of each part
OUTPUT = "the output"  # of the pass, among what a layer feeds
HEADS = re.compile(r"heads?$")  # of a number of heads
NO_WIDTH = re.compile(r"_features$|^nf$|head_(dim|size)$")  # numbers that no pass uses, or that do not change

Call = tuple[str, int]  # the name of a layer, and how often it was called before in this pass
Forward = Callable[[], Any]


def derive(model: nn.Module, forward: Forward, size: int, packs: Sequence[int] = PACKS) -> dict[str, str]:
    """{module or number: style} for `size` processes that share a layer. `model`: whole; its linear layers have the
    `forward` of their class; `forward`: a pass with the same samples and random numbers each time; `packs`: of
    `PACKS`."""
    passes, plan = _Passes(model, forward), dict[str, str]()
    for columns, rows in passes.pairs():
        # A layer between two others may be the row of one or the column of the other, not both.
        if not (columns | rows) & plan.keys():
            plan |= passes.rehearse(columns, rows, size, packs)
    return plan


class _Passes:
    """Passes of a model; the linear layers in it return given outputs. In the first pass, which is traced, they return
    their outputs plus random numbers: outputs of a pretrained model may be zeros, which show nothing. Later passes
    repeat these outputs, or shares of them."""

    def __init__(self, model: nn.Module, forward: Forward):
        self._forward, self._modules = forward, dict(model.named_modules())
        self.layers = {name: module for name, module in self._modules.items() if _is_plain(module)}  # the linear layers
        self.shared = shared_layers(self._modules) & self.layers.keys()  # linear layers that share a weight
        self._outputs: dict[Call, Tensor] = {}
        self._sources, self._consumers, self._between = ({name: set[str]() for name in self.layers} for _ in range(3))
        trace, of_layers = OperationTrace(), {weight for layer in self.layers.values() for weight in layer.parameters()}
        for name, weight in model.named_parameters():
            if weight not in of_layers:
                trace.origins[weight] = {name}
        generator = torch.Generator().manual_seed(0)

        def traced(call: Call, given: Tensor, own: Tensor) -> Tensor:
            name = call[0]
            for origin in () if isinstance(self.layers[name], nn.Embedding) else trace.of([given]):
                (self._sources if origin in self.layers else self._between)[name].add(origin)
            self._outputs[call] = own + torch.randn(own.shape, generator=generator).to(own)
            output = self._outputs[call].clone()  # models add to it in place
            trace.origins[output] = {name}
            return output

        with trace:
            self._inputs = self._run(traced, runs_layers=True)
        results = trace.of(value for call, value in self._inputs.items() if call[0] == OUTPUT)
        for name, sources in (self._sources | {OUTPUT: results & self.layers.keys()}).items():
            for source in sources:
                self._consumers[source].add(name)

    def _run(self, give: Callable[..., Tensor], runs_layers: bool = False) -> dict[Call, Any]:
        """A pass in which `give` (call, input, own output if the layers run) makes each linear layer's output. Returns
        each layer's input, and the outputs of the pass."""
        taken, number = dict[Call, Any](), Counter[str]()
        with ExitStack() as replaced:
            for name, layer in self.layers.items():

                def forward(*args: Any, name: str = name, own: Any = layer.forward, **named: Any) -> Tensor:
                    call, given = (name, number[name]), (*args, *named.values())[0]
                    number[name] += 1
                    taken[call] = given.clone()
                    return give(call, given, own(*args, **named) if runs_layers else None)

                replaced.enter_context(patch.object(layer, "forward", forward))
            results = tree_leaves(self._forward())
        return taken | {(OUTPUT, index): value for index, value in enumerate(results)}

    def pairs(self) -> list[tuple[set[str], set[str]]]:
        """(columns, rows) pairs, those with the most weights first. The columns' outputs go only to the rows, which get
        nothing else. Layers of a kind stay together: one may give the next values that depend on its heads."""
        found, seen = dict[Any, list[tuple[set[str], set[str]]]](), set[str]()
        for start, sources in self._sources.items():
            rows, columns, before = {start}, set(sources), -1
            while before < len(rows) + len(columns) and OUTPUT not in rows:
                before = len(rows) + len(columns)
                rows = rows.union(*(self._consumers[column] for column in columns))
                columns = columns.union(*(self._sources[row] for row in rows - {OUTPUT}))
            if start in seen or not columns or OUTPUT in rows or columns & rows or (columns | rows) & self.shared:
                continue
            seen |= rows
            groups = found.setdefault((*(frozenset(map(kind_of, end)) for end in (columns, rows)),), [])
            like = next((each for each in groups if not (columns | rows) & (each[0] | each[1])), (set(), set()))
            groups += [like] * (like not in groups)
            like[0].update(columns)
            like[1].update(rows)
        sizes = {name: layer.weight.numel() for name, layer in self.layers.items()}
        return sorted(sum(found.values(), []), key=lambda pair: -sum(sizes[name] for name in pair[0] | pair[1]))

    def rehearse(self, columns: set[str], rows: set[str], size: int, packs: Sequence[int]) -> dict[str, str]:
        """{name: style} for these layers and what is between them; nothing if they cannot be divided."""
        between = {weight.rpartition(".")[0] for row in rows for weight in self._between[row]}
        norms = [self._modules[name] for name in between]  # only vectors, as in a norm of the queries of each head
        is_other = any([*each.children()] or any(weight.ndim != 1 for weight in each.parameters()) for each in norms)
        if is_other or any(width_of(self.layers[row], 1) % size for row in rows):
            return {}
        for number in packs:
            packed = {name: 1 if isinstance(self.layers[name], nn.Embedding) else number for name in columns}
            if any(width_of(self.layers[name], 0) % (size * packed[name]) for name in columns):
                continue
            for numbers in self._numbers(packed, rows, size):
                if self._fits(packed, rows, numbers, size):
                    styles = {name: "colwise" if packed[name] == 1 else f"packed_colwise_{number}" for name in columns}
                    styles |= dict.fromkeys(rows, "rowwise") | dict.fromkeys(between, NORM_OF_HEADS)
                    return styles | dict.fromkeys(map(".".join, numbers), NUMBER)
        return {}

    def _fits(self, packed: Mapping[str, int], rows: set[str], numbers: Sequence[tuple[str, str]], size: int) -> bool:
        """Whether each process gets its share, if the columns give theirs and the numbers are divided."""

        def share(value: Tensor, packs: int, process: int) -> Tensor:
            return torch.cat([pack.chunk(size, -1)[process] for pack in value.chunk(packs, -1)], -1)

        def give(process: int, call: Call, given: Tensor, own: None) -> Tensor:
            output = self._outputs[call].clone()
            return share(output, packed[call[0]], process) if call[0] in packed else output

        with suppress(Exception), ExitStack() as divided:  # most often a shape that does not fit
            for module, key in ((self._modules[name], key) for name, key in numbers):
                divided.enter_context(patch.object(module, key, getattr(module, key) // size))
            for process in range(size):
                if (taken := self._run(partial(give, process))).keys() != self._inputs.keys():
                    return False
                for call, value in self._inputs.items():
                    if not is_same(taken[call], share(value, 1, process) if call[0] in rows else value):
                        return False
            return True
        return False

    def _numbers(self, packed: Mapping[str, int], rows: set[str], size: int) -> Iterator[list[tuple[str, str]]]:
        """Lists of (module, attribute) that may have to be divided, in the order in which they are tried."""
        yield []
        widths = {width_of(self.layers[name], 0) // part for name, number in packed.items() for part in (1, number)}
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


def _is_plain(module: nn.Module) -> bool:
    """Whether a linear layer works with a part of its weight like torch's own. A subclass may need the whole weight,
    as with quantized weights, or take something other than its inputs."""
    if not is_linear(module):
        return False
    if type(module).forward in (nn.Linear.forward, nn.Embedding.forward) or is_conv1d(module):
        return True
    part = {name: each[tuple(slice(size // 2) for size in each.shape)] for name, each in module.named_parameters()}
    given = torch.linspace(-1, 1, part["weight"].shape[1]).to(part["weight"])
    with suppress(Exception):  # the pass of a subclass may fail
        return is_same(torch.func.functional_call(module, part, given), F.linear(given, **part))
    return False
