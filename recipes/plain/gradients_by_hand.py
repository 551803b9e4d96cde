"""Several processes that average their gradients by hand: what DistributedDataParallel does, in three lines.

    python recipes/plain/gradients_by_hand.py --processes 2

Idea: each process holds the whole net and takes its part of the batch. After the backward pass an all-reduce sums the
gradients, and each process divides them by the number of processes. All nets then take the same step and stay equal.

Expect: the losses of one_process.py to 1e-5, for 1, 2 and 4 processes. `--torch_order` lets DistributedSampler
shuffle. With seed 0 that is the same order; with another seed it is not.

What people get wrong: the all-reduce comes after the step; all processes use GPU 0; and, with `--mistake`: each net
starts with its own weights (`unsynchronised_start`); the learning rate grows with the number of processes, but the
batch does not (`learning_rate_per_process`); each epoch has the same order (`set_epoch`, with `--torch_order`).
"""

import argparse
import gzip
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

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


def epoch_order(epoch: int, num_samples: int, seed: int) -> list[int]:
    """The ids of an epoch, in the order of one_process.py."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def make_net(num_pixels: int, seed: int) -> nn.Module:
    """The net of many tutorials."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(num_pixels, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


def train(rank: int, arguments: argparse.Namespace, device: torch.device) -> None:
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed + rank).to(device)
    if arguments.mistake != "unsynchronised_start":
        for weight in net.parameters():
            dist.broadcast(weight.data, src=0)
    factor = arguments.processes if arguments.mistake == "learning_rate_per_process" else 1
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE * factor)
    data, step, epoch = TensorDataset(images, labels), 0, 0
    shuffled: Any = DistributedSampler(data, shuffle=True, seed=arguments.seed, drop_last=True)
    while step < arguments.steps:
        if arguments.torch_order and arguments.mistake != "set_epoch":
            shuffled.set_epoch(epoch)
        source: Any = data if arguments.torch_order else Subset(data, epoch_order(epoch, len(data), arguments.seed))
        sampler = shuffled if arguments.torch_order else DistributedSampler(source, shuffle=False, drop_last=True)
        own_batch = BATCH_SIZE // arguments.processes
        for own_images, own_labels in DataLoader(source, own_batch, sampler=sampler, drop_last=True):
            loss = F.cross_entropy(net(own_images.to(device)), own_labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            for weight in net.parameters():  # between backward and step
                dist.all_reduce(weight.grad)
                weight.grad /= arguments.processes
            optimizer.step()
            mean, step = loss.detach() / arguments.processes, step + 1
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}  loss {mean.item():.7f}", flush=True)
            if step == arguments.steps:
                break
        epoch += 1
    if rank == 0:
        accuracy = (net(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean()
        print(f"accuracy {accuracy:.4f}", flush=True)


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    on_gpu = torch.cuda.device_count() >= arguments.processes  # NCCL takes one process per GPU
    torch.set_num_threads(1)
    backend, address = "nccl" if on_gpu else "gloo", f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=arguments.processes)
    train(rank, arguments, torch.device("cuda", rank) if on_gpu else torch.device("cpu"))
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    for name, default in (("--steps", 60), ("--seed", 0), ("--processes", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--torch_order", action="store_true", help="shuffle with DistributedSampler")
    parser.add_argument("--mistake", choices=["set_epoch", "learning_rate_per_process", "unsynchronised_start"])
    arguments = parser.parse_args()
    if arguments.processes < 1 or BATCH_SIZE % arguments.processes:
        parser.error(f"--processes {arguments.processes} does not divide the batch of {BATCH_SIZE}: use 1, 2, 4 or 8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (arguments, port), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
