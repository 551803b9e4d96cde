"""Local SGD and DiLoCo: replicas train on their own and synchronise every H steps.

    torchrun --standalone --nproc_per_node 2 recipes/plain/local_sgd.py

Idea: each process takes H optimizer steps on its own samples, without communication. Then all replicas continue from
the mean of their weights, so they send 1/H of the bytes of DDP. DiLoCo treats the distance from the last shared
weights to this mean as a gradient, and gives it to an outer optimizer with momentum (`--outer_momentum 0.9`).

Expect: with `--sync_every 1` the losses of DDP to 1e-5. With H = 10, all-reduce gets a tenth of DDP's bytes, and 60
losses of two processes are within 1e-4 of DDP's, relative. The replicas are up to 0.0036 apart (`spread`), and
identical after each synchronisation. DiLoCo (0.9, `--outer_learning_rate 0.7`) reaches a loss of 2.303, DDP 2.310.

What people get wrong: they average gradients every H steps, and the replicas never meet again; they evaluate one
replica before it synchronises; they forget that Adam's averages and batch normalisation's statistics stay different.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH_SIZE, LEARNING_RATE = 128, 0.01


def load_data(data: str) -> list[Tensor]:
    """[training images, labels, test images, labels]; images are float32 of shape (n, pixels) in [0, 1]."""
    if data == "digits":
        digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        images, labels = torch.from_numpy((digits.data / 16 * 255).round() / 255).float(), torch.tensor(digits.target)
        return [images[order[359:]], labels[order[359:]], images[order[:359]], labels[order[:359]]]
    arrays = []
    for name, start in (("train-images", 16), ("train-labels", 8), ("t10k-images", 16), ("t10k-labels", 8)):
        path = next(Path(data).glob(f"{name}*"))
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        array = torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8)
        arrays.append(array.view(int.from_bytes(content[4:8]), -1).float() / 255 if start == 16 else array.long())
    return arrays


def sample_ids(step: int, num_samples: int, seed: int) -> Tensor:
    """The ids of the global batch of a step: each epoch has a new order; its last, smaller batch is dropped."""
    epoch, position = divmod(step, num_samples // BATCH_SIZE)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_samples, generator=generator)
    return order[position * BATCH_SIZE : (position + 1) * BATCH_SIZE]


def make_net(num_pixels: int, seed: int) -> nn.Module:
    """The net of many tutorials."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(num_pixels, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


@torch.no_grad()
def synchronise(net: nn.Module, shared: nn.Parameter, outer_optimizer: torch.optim.Optimizer) -> None:
    """One outer step: moves the shared weights towards the mean of the replicas. All replicas continue from them."""
    dist.all_reduce(mean := parameters_to_vector(net.parameters()) / dist.get_world_size())
    shared.grad = shared - mean  # a step of SGD with learning rate 1 and no momentum ends at the mean
    outer_optimizer.step()
    vector_to_parameters(shared.clone(), net.parameters())  # a clone, because the weights become views of it


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed).to(device)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    shared = nn.Parameter(parameters_to_vector(net.parameters()).detach())  # all start alike: they share the seed
    momentum, learning_rate = arguments.outer_momentum, arguments.outer_learning_rate
    outer_optimizer = torch.optim.SGD([shared], learning_rate, momentum, nesterov=momentum > 0)
    for step in range(arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed).chunk(size)[rank]
        loss = F.cross_entropy(net(images[ids].to(device)), labels[ids].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_sync_step := (step + 1) % arguments.sync_every == 0 or step + 1 == arguments.steps:
            synchronise(net, shared, outer_optimizer)
        weights = parameters_to_vector(net.parameters()).detach()
        dist.all_reduce(extremes := torch.stack([weights, -weights]), dist.ReduceOp.MAX)  # only for `spread`
        dist.all_reduce(mean := loss.detach() / size)
        if rank == 0:
            print(f"step {step + 1}  loss {mean.item():.7f}  bytes {shared.nbytes * is_sync_step}", end="  ")
            print(f"spread {extremes.sum(0).max().item():.1e}", flush=True)
    if rank == 0:
        accuracy = (net(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean()
        print(f"accuracy {accuracy:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync_every", type=int, default=10, help="H, the steps between synchronisations")
    parser.add_argument("--outer_momentum", type=float, default=0.0, help="DiLoCo takes 0.9")
    parser.add_argument("--outer_learning_rate", type=float, default=1.0, help="DiLoCo takes 0.7")
    arguments = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", 0))
    if size == 0 or BATCH_SIZE % size:
        parser.error(f"start with torchrun, with a number of processes that divides {BATCH_SIZE} (now {size})")
    if arguments.sync_every < 1:
        parser.error("--sync_every must be at least 1")
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
