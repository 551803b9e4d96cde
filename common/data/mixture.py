"""Several sources of data in one set, each with a weight."""

import itertools
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from ..errors import UsageError
from ..plan import Sampler
from .batches import Batch, ForwardStep, MapDataset

SHARE = "share"  # of a source in the samples, or in what weighs them
OF = "@"  # between the names of a metric and a source


class Mixture(Dataset):
    """The samples of several sources. As a training set of `fit`, an epoch has of each source its share.

    What a step takes is a function of the seed and the step, as of any training set. Each epoch draws other samples of
    a source that has more than its share, in another order.

    Args:
        sources: {name: map-style dataset}
        weights: {name: of its samples, against those of the others}; None for an evaluation, which takes each sample.
        repeats: an epoch ends when each source has been taken whole, and smaller ones repeat. Else it ends when the
            first source is used up, and no sample comes twice.

    Raises:
        UsageError: a source is empty, or its share of an epoch has no sample.
    """

    def __init__(
        self, sources: Mapping[str, MapDataset], weights: Mapping[str, float] | None = None, repeats: bool = False
    ):
        self.names, self.sources = list(sources), list(sources.values())
        self.sizes = [len(source) for source in self.sources]
        self.ends = list(itertools.accumulate(self.sizes))
        for name, size in zip(self.names, self.sizes):
            if size == 0:
                raise UsageError(f"{name} is empty: remove it from the mixture")
        if weights is not None:
            total = sum(weights.values())
            shares = [weights[name] / total for name in self.names]
            length = (max if repeats else min)(size / share for size, share in zip(self.sizes, shares))
            self.counts = [int(share * length + 1e-6) for share in shares]  # samples of each in an epoch
            if 0 in self.counts:
                name = self.names[self.counts.index(0)]
                raise UsageError(
                    f"{name} has a share of less than one sample in an epoch: type a larger weight for it, or "
                    "--mixture_ends all"
                )

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Any:
        source = bisect_right(self.ends, index)
        sample = self.sources[source][index - self.ends[source] + self.sizes[source]]
        return sample | {"source": source}

    def sampler(self, epoch: int, generator: torch.Generator) -> torch.Tensor:
        """The ids of an epoch, as a `sampler` of `fit`."""
        parts = []
        for end, size, count in zip(self.ends, self.sizes, self.counts):
            passes = [torch.randperm(size, generator=generator) for _ in range(-(-count // size))]
            parts.append(torch.cat(passes)[:count] + end - size)
        ids = torch.cat(parts)
        return ids[torch.randperm(len(ids), generator=generator)]

    def noted(self, forward_step: ForwardStep) -> ForwardStep:
        """A `forward_step` that returns each metric of each source, too: "loss@a" is 0 for a sample of another source.
        `of_sources` makes means of them."""

        def step(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
            source = batch["source"]
            values = forward_step(model, {name: value for name, value in batch.items() if name != "source"})
            metrics = {name: value.detach() for name, value in values.items() if value.ndim == 1}
            for number, name in enumerate(self.names) if "loss" in values else ():  # not with a batch_loss
                share = (source == number).to(values["loss"].dtype)
                values[f"{SHARE}{OF}{name}"] = share
                values |= {f"{kind}{OF}{name}": value * share for kind, value in metrics.items() if is_mean(value)}
            return values

        return step


def by_source(train_set: Any, forward_step: ForwardStep, sampler: Sampler | None) -> tuple[ForwardStep, Sampler | None]:
    """(forward_step, sampler): of a mixture, with the metrics of each source and the order of its epochs."""
    if not isinstance(train_set, Mixture):
        return forward_step, sampler
    return train_set.noted(forward_step), sampler or train_set.sampler


def is_mean(value: torch.Tensor) -> bool:
    """Whether a value has a mean over samples, other than a class."""
    return value.is_floating_point()


def of_sources(means: Mapping[str, float]) -> dict[str, float]:
    """Means over all samples -> with those of a source's metrics over its own samples; not a number without any."""
    found = dict(means)
    for name, value in means.items():
        kind, _, source = name.partition(OF)
        share = means.get(f"{kind.rpartition('/')[0]}{'/' * ('/' in kind)}{SHARE}{OF}{source}")
        if source and share is not None and kind.rpartition("/")[2] != SHARE:
            found[name] = value / share if share else float("nan")
    return found
