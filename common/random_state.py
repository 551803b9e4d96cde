"""The random states of this process: all generators that a forward pass or a dataset may use."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor

from common.environment import device_type

ON_CPU = ("random.torch", "random.python", "random.python_gauss", "random.numpy", "random.numpy_gauss")


def random_state() -> dict[str, Tensor]:
    """The random states of torch (CPU, and current GPU if there is one), Python and NumPy, as tensors."""
    _, python, gauss = random.getstate()
    of_numpy = numpy.random.get_state(legacy=False)
    keys, position = of_numpy["state"]["key"], of_numpy["state"]["pos"]
    state = {
        "random.torch": torch.get_rng_state(),
        "random.python": torch.tensor(python),
        "random.python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "random.numpy": torch.tensor([*keys.tolist(), position, of_numpy["has_gauss"]]),
        "random.numpy_gauss": torch.tensor(of_numpy["gauss"], dtype=torch.float64),
    }
    if (device := device_type()) != "cpu":
        state[f"random.{device}"] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restores the result of `random_state`."""
    torch.set_rng_state(state["random.torch"])
    gauss = float(state["random.python_gauss"])
    random.setstate((3, tuple(state["random.python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["random.numpy"].tolist()
    cached = float(state["random.numpy_gauss"])
    numpy.random.set_state(("MT19937", numpy.array(keys, numpy.uint32), position, has_gauss, cached))
    if f"random.{device_type()}" in state:
        torch.get_device_module(device_type()).set_rng_state(state[f"random.{device_type()}"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the random states at the end of the `with` block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
