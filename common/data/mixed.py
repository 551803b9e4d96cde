"""Several sources of data in one set, each with a weight."""

from bisect import bisect_right
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from ..errors import UsageError
from ..plan import Sampler
from .sets import Batch, ForwardStep, MapDataset

SOURCE = "source of the sample"  # in a batch: its number
SHARE = "share"  # of a source in the samples, or in their weights
OF = "@"  # between the names of a metric and a source


class Mixture(ConcatDataset):
    """The samples of several sources. As a training set of `fit`, each source has its share of an epoch.

    The samples of a step are a function of the seed and the step, as for any training set. Each epoch draws different
    samples of a source that has more than its share, in a different order. Raises UsageError if a source is empty, its
    name has "@" or "/", or its share of an epoch has no sample.

    Args:
        sources: {name: map-style dataset}
        weights: {name: its weight, relative to the others}; None for an evaluation, which takes every sample.
        repeats: an epoch ends when every source is used up, and smaller ones repeat. Otherwise it ends when the
            first source is used up, and no sample repeats.
    """

    def __init__(
        self, sources: Mapping[str, MapDataset], weights: Mapping[str, float] | None = None, repeats: bool = False
    ):
        super().__init__(sources.values())  # type: ignore[arg-type]  # datasets of any class
        self.names, self.sources = list(sources), list(sources.values())
        self.sizes = [len(source) for source in self.sources]
        for name, size in zip(self.names, self.sizes):
            if size == 0:
                raise UsageError(f"{name} is empty", "remove it from the mixture")
            if OF in name or "/" in name:
                raise UsageError(f"a source has the name {name}", "remove @ and /, which the names of metrics use")
        if weights is not None:
            shares = [weights[name] / sum(weights.values()) for name in self.names]
            length = (max if repeats else min)(size / share for size, share in zip(self.sizes, shares))
            self.counts = [int(share * length + 1e-6) for share in shares]  # samples of each in an epoch
            if 0 in self.counts:
                name = self.names[self.counts.index(0)]
                raise UsageError(
                    f"{name} gets less than one sample per epoch", "use a larger weight for it, or --mixture_ends all"
                )

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {SOURCE: bisect_right(self.cumulative_sizes, index)}

    def sampler(self, epoch: int, generator: torch.Generator) -> torch.Tensor:
        """The ids of an epoch, as a `sampler` of `fit`."""
        parts = []
        for end, size, count in zip(self.cumulative_sizes, self.sizes, self.counts):
            passes = [torch.randperm(size, generator=generator) for _ in range(-(-count // size))]
            parts.append(torch.cat(passes)[:count] + end - size)
        ids = torch.cat(parts)
        return ids[torch.randperm(len(ids), generator=generator)]

    def add_source_metrics(self, forward_step: ForwardStep) -> ForwardStep:
        """A `forward_step` that adds each source's metrics: "loss@a" is 0 for other sources' samples (`of_sources`)."""

        @wraps(forward_step)  # its signature shows whether it takes the number of the step
        def with_sources(model: Any, batch: Batch, *number: int) -> dict[str, torch.Tensor]:
            values = forward_step(model, {name: value for name, value in batch.items() if name != SOURCE}, *number)
            source = batch.get(SOURCE, torch.tensor(-1))  # an evaluation set need not be a mixture
            # Leaves out classes, which have no mean.
            metrics = {k: each.detach() for k, each in values.items() if each.ndim == 1 and each.is_floating_point()}
            for place, name in enumerate(self.names) if "loss" in values else ():  # not with a batch_loss
                share = (source == place).to(values["loss"]).expand(len(values["loss"]))
                values[f"{SHARE}{OF}{name}"] = share
                values |= {f"{kind}{OF}{name}": value * share for kind, value in metrics.items()}
            return values

        return with_sources


def parts_of(*datasets: Any) -> list[Any]:
    """The datasets, and for each mixture its sources."""
    return [part for dataset in datasets for part in (dataset.sources if isinstance(dataset, Mixture) else [dataset])]


def by_source(
    train_set: Any, eval_set: Any, forward_step: ForwardStep, sampler: Sampler | None
) -> tuple[ForwardStep, Sampler | None]:
    """(forward_step, sampler); for a mixture, with the metrics of each source and the order of its epochs. Raises
    UsageError if a mixture for training has no weights, or one for evaluation has different names."""
    if not isinstance(train_set, Mixture):
        return forward_step, sampler
    if not hasattr(train_set, "counts"):
        raise UsageError("a Mixture for training needs weights", "pass one for each source")
    for other in eval_set.values() if isinstance(eval_set, Mapping) else (eval_set,):
        if isinstance(other, Mixture) and other.names != train_set.names:
            raise UsageError(
                f"the evaluation mixes {', '.join(other.names)}, the training {', '.join(train_set.names)}",
                "give both the same names in the same order",
            )
    return train_set.add_source_metrics(forward_step), sampler or train_set.sampler


def _share_of(name: str) -> str:
    """The name of the share of the source in a metric's name, such as "train/share@a" for "train/loss@a"."""
    kind, _, source = name.rpartition(OF)
    place = kind.rpartition("/")[0]
    return f"{place}{'/' * bool(place)}{SHARE}{OF}{source}"


def without_sources(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, without the metrics of single sources."""
    return {name: value for name, value in values.items() if OF not in name or _share_of(name) not in values}


def of_sources(means: Mapping[str, float]) -> dict[str, float]:
    """Turns each source's means over all samples into means over its own samples; leaves out sources without any."""
    found: dict[str, float] = {}
    for name, value in means.items():
        if share := means.get(_share_of(name), 1.0) if OF in name else 1.0:
            found[name] = value if name == _share_of(name) else value / share
    return found
