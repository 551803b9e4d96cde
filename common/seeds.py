"""Random numbers as a function of the position in the run, not of the process that draws them."""

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

EVALUATION = -1  # stands for the epoch of an evaluation, which draws the same numbers each time
UPDATE = -1  # stands for the micro-batch when the optimizer changes the weights
COMPARISON = -2  # stands for the micro-batch when `batch_loss` compares the samples of the global batch
SCHEDULE = -3  # stands for the micro-batch when the recipe's own schedule is called
SUMMARY = -4  # stands for the micro-batch when the metrics of an evaluation are summarized
CPU = torch.device("cpu")


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Seeds the generators of Python, NumPy and torch on the CPU before a dataset makes a sample. `seed`: `--seed`;
    `epoch`: of the training set, from 0; or EVALUATION; `sample`: its id."""
    _seed(seed, epoch, sample, CPU)


def seed_batch(seed: int, epoch: int, samples: Sequence[int]) -> None:
    """Like `seed_sample`, before a dataset or its `collate_fn` makes a batch of these samples."""
    _seed(seed, ~epoch, zlib.crc32(numpy.asarray(samples, numpy.int64).tobytes()), CPU)


def seed_forward(seed: int, step: int, row: int, device: torch.device) -> None:
    """Seeds the generators of Python, NumPy and torch, on the CPU and on the device, before a forward pass: for dropout
    and noise. Also before an update of the weights, and before a call of the recipe's own schedule or sampler. `seed`:
    `--seed`; `step`: optimizer steps taken; or EVALUATION; `row`: the number of the micro-batch, counted over all
    processes in this step; or a constant in its place; `device`: of the model."""
    _seed(~seed, step, row, device)  # different numbers than for the samples


def generator_states(device: torch.device) -> list[Any]:
    """The states of all generators that the functions above seed. Equal states have drawn the same numbers."""
    arrays: Any = numpy.random.get_state(legacy=False)
    key = (arrays["state"]["key"].tobytes(), arrays["state"]["pos"], arrays["has_gauss"], arrays["gauss"])
    with _disable_current_modes():  # a plan computes without values
        states = [random.getstate(), key, torch.get_rng_state().numpy().tobytes()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device).numpy().tobytes())
    return states


@contextmanager
def restore_generators(device: torch.device) -> Iterator[None]:
    """After the `with` block, restores the states that the generators had before it."""
    python, arrays, devices = random.getstate(), numpy.random.get_state(), [device] if device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


def _seed(seed: int, position: int, index: int, device: torch.device) -> None:
    """Seeds by a 63-bit hash: SplitMix64 (Steele et al. 2014) of a sum with odd factors. torch's CPU generator
    uses only the lower half of a seed, so nearby positions must differ there."""
    number = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + index * 0xDA942042E4DD58B5) % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    number = (number ^ (number >> 31)) >> 1
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
