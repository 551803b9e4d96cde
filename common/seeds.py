"""Random numbers as a function of the position in the run, not of the process that draws them."""

import random

import numpy
import torch

EVALUATION = -1  # stands for the epoch of an evaluation, which draws the same numbers each time


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Seeds the generators of Python, NumPy and torch on the CPU before a dataset makes a sample.

    Args:
        seed: `--seed`.
        epoch: of the training set, from 0; or EVALUATION.
        sample: its id.
    """
    number = _mixed(seed, epoch, sample)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def seed_forward(seed: int, step: int, row: int, device: torch.device) -> None:
    """Seeds torch's generators, on the CPU and on the device, before a forward pass: for dropout and noise.

    Args:
        seed: `--seed`.
        step: optimizer steps taken; or EVALUATION.
        row: the number of the micro-batch among those of all processes in this step.
        device: of the model.
    """
    number = _mixed(~seed, step, row)  # other numbers than those of the samples
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def _mixed(seed: int, position: int, index: int) -> int:
    """A 63-bit hash: SplitMix64 (Steele et al. 2014) of a sum with odd factors. torch's generator of the CPU uses the
    lower half of a seed only, so that nearby positions must differ there."""
    number = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + index * 0xDA942042E4DD58B5) % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return (number ^ (number >> 31)) >> 1
