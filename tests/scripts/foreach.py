"""recipes/mnist.py with the foreach kernels of torch's optimizers, which are the default on GPUs with loss scaling."""

import functools
import runpy
from pathlib import Path

import torch

torch.optim.AdamW = functools.partial(torch.optim.AdamW, foreach=True)
torch.optim.SGD = functools.partial(torch.optim.SGD, foreach=True)
runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "mnist.py"), run_name="__main__")
