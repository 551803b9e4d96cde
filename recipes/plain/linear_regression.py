"""A linear model fitted by SGD under DistributedDataParallel, compared with the closed-form solution.

    torchrun --standalone --nproc_per_node 2 recipes/plain/linear_regression.py

Idea: 100 samples of 10 features, batches of 10, 5 epochs, SGD with learning rate 0.01, as in many tutorials. Least
squares has a closed-form solution, so the distance to it shows how far the training has come. 4 processes cannot share
10 samples equally, so each process sends the sum of its squared errors, not their mean.

Expect: in 5 epochs the loss falls from 7.8 to 2.3, and the distance to the closed form is still 43 %. `--steps 1000`
takes it to 0.015 %. Both are the same for 1, 2 and 4 processes.

What people get wrong: they stop after 5 epochs and call the weights the solution; DDP averages the gradients of the
processes, so with unequal shares the samples of a small share count more (`--mistake mean_of_means` with 4 processes:
the distance is 0.428 instead of 0.431, and nothing looks wrong); they compare with the weights that made the data,
which noise separates from the closed form.
"""

import argparse
import os

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE, LEARNING_RATE = 10, 0.01
NUM_SAMPLES, NUM_FEATURES, NOISE = 100, 10, 0.1


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """Features (100, 10) and targets (100, 1): a random linear function of the features, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    features, weights, noise = (
        torch.randn(shape, generator=generator)
        for shape in ((NUM_SAMPLES, NUM_FEATURES), (NUM_FEATURES, 1), (NUM_SAMPLES, 1))
    )
    return features, features @ weights + 1 + NOISE * noise


def sample_ids(step: int, num_samples: int, seed: int) -> Tensor:
    """The ids of the global batch of a step: each epoch has a new order; its last, smaller batch is dropped."""
    epoch, position = divmod(step, num_samples // BATCH_SIZE)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_samples, generator=generator)
    return order[position * BATCH_SIZE : (position + 1) * BATCH_SIZE]


def closed_form(features: Tensor, targets: Tensor) -> Tensor:
    """The least-squares solution in float64: the weights, then the bias."""
    with_ones = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
    return torch.linalg.lstsq(with_ones, targets.double()).solution[:, 0]


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains, then compares with the closed form; each process runs this."""
    size, rank = dist.get_world_size(), dist.get_rank()
    features, targets = make_data(arguments.seed)
    torch.manual_seed(arguments.seed)
    model = nn.Linear(NUM_FEATURES, 1).to(device)
    ddp_model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for step in range(arguments.steps):
        ids = sample_ids(step, NUM_SAMPLES, arguments.seed)[rank::size]
        squares = (ddp_model(features[ids].to(device)) - targets[ids].to(device)).square()
        # With 4 processes the shares are 3, 3, 2 and 2 samples. DDP divides the sum over processes by their number, so
        # each sends its own sum times `size` / 10: then every sample counts once.
        loss = squares.mean() if arguments.mistake else squares.sum() * size / BATCH_SIZE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = squares.detach().sum()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}  loss {total.item() / BATCH_SIZE:.7f}", flush=True)
    if rank == 0:
        fitted = torch.cat([model.weight[0], model.bias]).detach().cpu().double()
        best = closed_form(features, targets)
        print(f"distance to the closed form {((fitted - best).norm() / best.norm()).item():.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="10 are an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mistake", choices=["mean_of_means"])
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run torchrun --standalone --nproc_per_node 2 before the script, not python")
    size = int(os.environ["WORLD_SIZE"])
    if size > BATCH_SIZE:
        parser.error(f"{size} processes: a batch has only {BATCH_SIZE} samples")
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
