"""A loss that compares the samples of the global batch, in two passes per step: GradCache (Gao et al. 2021)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..errors import UsageError
from ..layout import Layout
from ..plan import Plan
from ..seeds import COMPARISON, restore_generators, seed_forward
from .guards import graph_of, leaves_of
from .values import check_metrics

Values = dict[str, Tensor]
BatchLossFn = Callable[[Values], Values]  # {name: values of samples, (samples, ...)} -> {metric: (samples,)}

SAMPLE_WEIGHT = "weight of the sample"  # a key next to the values of `forward_step` if the batches have a "weight"
MOST_DIFFERENCE = 0.02  # between the values of the two passes, relative to their norm: rounding changes less


@dataclass(frozen=True)
class Share:
    """One micro-batch's share in the loss of the global batch."""

    metrics: Values  # what `batch_loss` returned for its samples, without a graph
    values: Values  # of `forward_step` in the first pass
    gradients: Values  # of the sum of weight × loss over the global batch, for these values

    def connection(self, values: Values) -> Tensor:
        """0, whose gradient is the part of the global batch's gradient that passes through these values."""
        terms = [((values[name] - values[name].detach()) * gradient).sum() for name, gradient in self.gradients.items()]
        return torch.stack([term.float() for term in terms]).sum()

    def check_same(self, values: Values) -> None:
        """Raises UsageError if the second pass returned different values. Reads from the device."""
        for name in self.gradients:
            old, new = self.values[name].double(), values[name].detach().double()
            if float((new - old).norm()) > MOST_DIFFERENCE * float(old.norm()):
                raise UsageError(
                    f'"{name}" differs when forward_step is called again for the same batch, and batch_loss needs two '
                    "passes: keep no state, and draw from the generators of torch, numpy or random, which are seeded"
                )


@dataclass
class BatchLoss:
    function: BatchLossFn  # the user's
    plan: Plan  # of the run
    device: torch.device  # of the values

    def __call__(self, values: Values, step: int) -> Values:
        """The metrics of the samples with these values, (samples, ...), each of shape (samples,). Raises UsageError for
        other shapes. `step`: number of the optimizer step, or EVALUATION; random numbers are a function of it."""
        given = {name: value.clone() for name, value in values.items() if name != SAMPLE_WEIGHT}  # it may change them
        with restore_generators(self.device):
            seed_forward(self.plan.config.seed, step, COMPARISON, self.device)
            metrics = self.function(given)
        check_metrics(metrics, len(next(iter(given.values()))), "batch_loss")
        return {name: metrics[name] for name in sorted(metrics)}

    def shares(self, values: Values, step: int) -> list[Share]:
        """The share of each micro-batch of a step, from the values of the global batch, of shape (batch_size, ...)."""
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in values.items()}
            metrics = self(leaves, step)
            total = (metrics["loss"] * values.get(SAMPLE_WEIGHT, 1)).sum()
        if others := leaves_of(graph_of([total])) - {*leaves.values()}:  # their gradients would be lost
            raise UsageError(
                f"batch_loss uses a weight of shape {tuple(others.pop().shape)} that is not among its values: return "
                "it from the model and from forward_step, expanded to (batch, ...)"
            )
        sources = [name for name, leaf in leaves.items() if leaf.requires_grad and name != SAMPLE_WEIGHT]
        found = torch.autograd.grad(total, [leaves[name] for name in sources], allow_unused=True)
        gradients = {name: gradient for name, gradient in zip(sources, found) if gradient is not None}
        return [Share(*parts) for parts in zip(*map(self._divide, (metrics, values, gradients)))]

    def _divide(self, values: Values) -> list[Values]:
        """The values of each micro-batch of a step."""
        size = self.plan.micro_batch_size
        starts = range(0, self.plan.config.batch_size, size)
        return [{name: value[start : start + size].detach() for name, value in values.items()} for start in starts]


def put(rows: Values, index: int, num: int, values: Values) -> None:
    """Makes these values row `index` of `rows`, of shape (num, ...). The first call allocates all rows; otherwise
    small tensors would lie between the activations of later passes. Sizes of predictions may differ between passes."""
    for name, value in values.items():
        if name not in rows:
            rows[name] = value.new_empty((num, *value.shape))
        if value.shape != (old := rows[name].shape[1:]):
            sizes = [*map(max, value.shape, old)]
            rows[name], value = widened(rows[name], sizes), widened(value, sizes)
        rows[name][index] = value


def widened(value: Tensor, sizes: Sequence[int]) -> Tensor:
    """A tensor padded to these last sizes: with -100, like transformers' labels; False; or 0 for unsigned integers."""
    missing = [each for new, old in zip(reversed(sizes), reversed(value.shape)) for each in (0, new - old)]
    return nn.functional.pad(value, missing, value=-100 if value.dtype.is_signed else 0)


def gather(accelerator: Accelerator, layout: Layout, rows: Tensor) -> Tensor:
    """The values of all samples in their order: (samples, ...). `rows`: own ones, (micro-batches, micro_batch, ...)."""
    return accelerator.gather(rows[None])[:: layout.model_parallel_size].transpose(0, 1).flatten(0, 2)
