"""Samples that users bring, habits of data sets, samplers and `collate_fn`, and mistakes."""

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, WeightedRandomSampler, default_collate

from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.environment import rank

WIDTH = int(os.environ.get("USERS_WIDTH", 16))  # tests/large sets it
LENGTH, VOCABULARY, PIXELS, FRAMES = 8, 32, 32, 64
OWN = torch.Generator().manual_seed(3)
NUMPY_OWN = numpy.random.default_rng(3)
READ = Counter[int]()  # how often this process has read each sample


class Samples(Dataset):
    """A vector "x" of WIDTH numbers with its target "y", and LENGTH tokens with the next tokens and a class."""

    def __init__(self, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        READ[index] += 1
        x, tokens = self.x[index], self.tokens[index]
        return {"x": x, "y": x.sin().sum(), "tokens": tokens[:-1], "next": tokens[1:], "label": int(tokens[0]) % 2}


class Media(Samples):
    """Also an image, a spectrogram and a waveform."""

    def __init__(self, size: int, seed: int):
        super().__init__(size, seed)
        generator = torch.Generator().manual_seed(seed)
        self.image = torch.randn(size, 3, PIXELS, PIXELS, generator=generator)
        self.spectrogram = torch.randn(size, 8, FRAMES, generator=generator)
        self.wave = torch.randn(size, 800, generator=generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        media = {"image": self.image[index], "spectrogram": self.spectrogram[index], "wave": self.wave[index]}
        return super().__getitem__(index) | media


class DrawsForBatches(Samples):
    def __getitems__(self, ids: list[int]) -> list[dict[str, Any]]:
        return [self[index] | {"x": self.x[index] + 0.3 * torch.randn(WIDTH)} for index in ids]


class ChangesItsSamples(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        self.x[index] += 0.1
        return super().__getitem__(index)


def changed(change: Callable[[dict[str, Any], int], Any]) -> Callable[[int, int], Dataset]:
    """(size, seed) -> samples, each of which `change` alters: (sample, index) -> sample."""

    class Changed(Samples):
        def __getitem__(self, index: int) -> Any:
            return change(super().__getitem__(index), index)

    return Changed


def noisy(sample: dict[str, Any], index: int) -> dict[str, Any]:
    return sample | {"x": sample["x"] + random.random() + float(numpy.random.rand()) + torch.rand(WIDTH)}


def noisy_by_its_own_generator(sample: dict[str, Any], index: int) -> dict[str, Any]:
    return sample | {"x": sample["x"] + 0.3 * torch.randn(WIDTH, generator=OWN)}


class KeepsDraws(Samples):
    """Augments each sample once, when it is read first."""

    def __init__(self, size: int, seed: int):
        super().__init__(size, seed)
        self.kept: dict[int, dict[str, Any]] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self.kept:
            self.kept[index] = noisy(super().__getitem__(index), index)
        return self.kept[index]


SETS: dict[str, Callable[[int, int], Dataset]] = {
    "draws_for_batches": DrawsForBatches,
    "draws_for_samples": changed(noisy),
    "keeps_what_it_draws": KeepsDraws,
    "with_its_own_generator": changed(noisy_by_its_own_generator),
    "changes_its_samples": ChangesItsSamples,
    "weights_of_two_types": changed(lambda sample, index: sample | {"weight": 1 if index % 4 else 0.5}),
    "with_names": changed(lambda sample, index: sample | {"name": f"sample {index}"}),
}
MISTAKEN_SETS: dict[str, Callable[[int, int], Dataset]] = {
    "tuples": changed(lambda sample, index: (sample["x"], sample["y"])),
    "tensors": changed(lambda sample, index: sample["x"]),
    "unequal": changed(lambda sample, index: sample | {"x": sample["x"][: WIDTH - index % 2]}),
    "none": changed(lambda sample, index: sample | {"z": None}),
    "other_names": changed(lambda sample, index: sample | ({"z": 1} if index % 2 == 0 else {})),
    "column_of_weights": changed(lambda sample, index: sample | {"weight": torch.ones(1)}),
    "sample_by_rank": changed(lambda sample, index: sample | {"x": sample["x"] + rank()}),
    "length_by_rank": lambda size, seed: Samples(size + rank(), seed),
}


def masked(samples: list[dict[str, Any]]) -> Batch:
    batch = default_collate(samples)
    return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) > 0.2)}


def with_partners(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Each sample's negative is the sample before it."""
    batch = default_collate(samples)
    return batch | {"y": batch["y"] + 0.1 * batch["y"].roll(1), "partner": batch["x"].roll(1, 0)}


COLLATE_FNS = {
    "with_partners": with_partners,
    "masks": masked,
    "sorts": lambda each: default_collate(sorted(each, key=lambda one: float(one["y"]))),  # as packed sequences need
}
SAMPLERS: dict[str, Callable[[int, torch.Generator], Any]] = {
    "weighted": lambda epoch, generator: list(WeightedRandomSampler([1.0, 2.0] * 16, 32)),
    "of_numpy": lambda epoch, generator: numpy.random.permutation(32),
    "of_torch": lambda epoch, generator: torch.randperm(32),
    "with_its_own_generator": lambda epoch, generator: NUMPY_OWN.permutation(32),
    "least_read_first": lambda epoch, generator: sorted(range(32), key=lambda index: READ[index] * (epoch > 0)),
}
