"""Names the first module whose output or gradient differs from one process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import list_samples
from ..plan import Plan
from .modules import ModuleTrace, Place, Sums, relative_distances
from .reference import Reference
from .sketch import Sketch
from .tolerances import BF16, STEP_TIMES_FLOOR, TOLERANCE

ONE_FACTOR = 0.01  # share of the difference of all gradients that one factor may leave


@dataclass
class FirstDifference:
    """Looks for the first difference between a step of all processes and the same step of one process."""

    reference: Reference  # of one process
    number: int  # of the step
    plan: Plan  # of the run
    traces: Sequence[ModuleTrace]  # of each process, the main process first
    gradients: Mapping[str, Sketch]  # {name of a weight: its gradient over all processes}; empty under ZeRO
    grad_norm: float  # of all processes

    def find(self, kind: str) -> tuple[str, str]:
        """(where it is, the line that reports it). Where: "forward", "step" (forward_step itself), "loss" (its
        gradient), "backward", "gradient" (a weight's), "factor" or "norm" (of all gradients), or "". `kind`: of the
        difference, as in compare.Key; an evaluation has no trace."""
        if kind == "eval" or not any(trace.forward for trace in self.traces):
            return "", ""
        if (found := self._first_module([trace.forward for trace in self.traces], "forward")) is not None:
            _, place, extent = found
            return "forward", f"first difference: {self._name(place)}, forward, {extent}"
        if kind == "value":
            return "step", "all modules agree: forward_step computes the difference"
        where, line = self._first_backward()
        if kind == "norm" and not where and self.gradients:
            return "norm", "all gradients agree, but their norm differs, and so does the clipping"
        return where, line

    def _first_backward(self) -> tuple[str, str]:
        """As `find`, for the backward pass: first the modules, then the weights."""
        # If gradients are averaged over the processes, each process's gradient is larger than its part of the whole.
        factor = self.plan.layout.num_averaged
        if (found := self._first_module([trace.backward for trace in self.traces], "backward", factor)) is None:
            return self._first_gradient()
        before, place, extent = found
        if not any(sources := self._sources(before, place)):
            return "loss", f"first difference: the gradient of the loss, {extent}"
        return "backward", f"first difference: {' or '.join(map(self._name, sources))}, backward, {extent}"

    def _first_module(self, traces: Sequence[Sums], direction: str, factor: int = 1) -> tuple[str, str, str] | None:
        """(the module before it, the first one whose tensors are not factor × one process's, how they differ)"""
        expected: Sums = getattr(self.reference.steps[self.number].modules, direction)
        perturbed = [getattr(other.steps[self.number].modules, direction) for other in self.reference.perturbed]
        # A table of positions has no weights, and so no noise floor: 16 bits round it differently.
        least, before = BF16[""] if self.reference.is_low else TOLERANCE, list[str]()
        for place in dict.fromkeys(place for _, place in expected):
            floors = [float(gap.max()) for other in perturbed for _, gap in self._gaps(place, other, expected)]
            most = max([least, *(STEP_TIMES_FLOOR * floor for floor in floors)])
            largest, samples = 0.0, dict[int, list[int]]()  # {process: ids of its samples that differ}
            for rank, trace in enumerate(traces):
                for row, gap in self._gaps(place, trace, expected, factor):
                    if (differs := ~(gap <= most)).any():
                        largest, ids = max(largest, float(gap.max())), self._ids[row]
                        ids = ids[differs] if len(differs) == len(ids) else ids  # else no sample has its own tensor
                        samples.setdefault(rank, []).extend(ids.tolist())
            if samples:
                inner = [name for name in before if not place[0].startswith(f"{name}." if name else "")]
                return (inner or [""])[-1], place[0], self._extent(largest, samples)
            before.append(place[0])
        return None

    def _extent(self, largest: float, samples: Mapping[int, list[int]]) -> str:
        """How large a difference is, and in which samples of which process."""
        rank, ids = next(iter(samples.items()))
        is_whole = len(ids) == self.plan.accumulation * self.plan.micro_batch_size > 1
        which = "all samples" if is_whole else list_samples(sorted(ids))
        return f"{largest:.1e} of its size, {which} of process {rank}{' and in others' * (len(samples) > 1)}"

    def _gaps(self, place: Place, sums: Sums, expected: Sums, factor: int = 1) -> Iterator[tuple[int, Tensor]]:
        """(row, difference of each sample relative to its size, or to a larger mean of all) of each micro-batch"""
        rows_of: dict[tuple[torch.Size, torch.Size], list[int]] = {}  # {shapes: rows to compare at once}
        for row in range(len(self._ids)):
            if (row, place) in sums and (row, place) in expected:
                rows_of.setdefault((sums[row, place].shape, expected[row, place].shape), []).append(row)
        for rows in rows_of.values():
            own, whole = (torch.cat([each[row, place] for row in rows]) for each in (sums, expected))
            if (gap := relative_distances(own / factor, whole)) is not None:
                yield from zip(rows, gap.chunk(len(rows)))

    @cached_property
    def _ids(self) -> list[Tensor]:
        """The ids of the samples of each row."""
        return [ids for _, ids in self.plan.global_micro_batches(self.number)]

    def _name(self, module: str) -> str:
        return f"{module or 'the model'} ({self.reference.steps[self.number].modules.classes[module]})"

    def _sources(self, before: str, module: str) -> list[str]:
        """The origins of the gradient of a module's output: the innermost modules that use the output, or else the
        module whose gradient arrived before; "" is the whole model, whose output is the loss."""
        followers = self.reference.steps[self.number].modules.followers.get(module, {})
        inner = [name for name in followers if not any(other.startswith(f"{name}.") for other in followers if name)]
        return inner[:2] or [before]

    def _first_gradient(self) -> tuple[str, str]:
        """The line for the weight whose gradient differs first, in the order of the backward pass."""
        step, most_norm = self.reference.steps[self.number], self.plan.config.max_grad_norm
        own = {name: unclipped(sketch, self.grad_norm, most_norm) for name, sketch in self.gradients.items()}
        whole = {name: unclipped(sketch, step.grad_norm, most_norm) for name, sketch in step.gradients.items()}
        gaps = {name: _relative(own[name], gradient) for name, gradient in whole.items() if name in own}
        for other in self.reference.perturbed:
            perturbed = other.steps[self.number]
            for name in gaps.keys() & perturbed.gradients.keys():
                gradient = unclipped(perturbed.gradients[name], perturbed.grad_norm, most_norm)
                if gaps[name] <= max(TOLERANCE, STEP_TIMES_FLOOR * _relative(gradient, whole[name])):
                    del gaps[name]
        if not gaps:
            return "", ""
        pairs = ((own[name].sums, whole[name].sums) for name in own if name in whole)
        found, expected = (torch.cat(sums) for sums in zip(*pairs))
        factor = float(found @ expected / (expected @ expected).clamp(min=1e-30))
        if (found - factor * expected).norm() < ONE_FACTOR * (found - expected).norm():
            return "factor", f"first difference: each gradient is {factor:.4g} times that on one process"
        order = {place[0]: position for position, (_, place) in enumerate(step.modules.forward)}
        last = max(gaps, key=lambda name: order.get(name.rpartition(".")[0], -1))
        return "gradient", f"first difference: the gradient of {last}, {gaps[last]:.1e} of its size"


def unclipped(gradient: Sketch, norm: float, max_norm: float) -> Sketch:
    """A gradient as it was before clipping: `norm`: of the whole model's gradient; `max_norm` 0: no clipping."""
    factor = (norm + 1e-6) / max_norm if max_norm and norm > max_norm else 1.0
    return Sketch(gradient.sums * factor, gradient.rounding)


def _relative(sketch: Sketch, expected: Sketch) -> float:
    """The distance of two sketches, relative to the second."""
    return (sketch - expected).norm / max(expected.norm, 1e-30)
