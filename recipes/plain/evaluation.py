"""Evaluation on several processes that counts each sample once.

    torchrun --standalone --nproc_per_node 2 recipes/plain/evaluation.py

Idea: each rank evaluates its own samples, and an all-reduce sums two numbers: correct answers and samples. Their ratio
is the accuracy of the whole set, whatever the number of processes and the size of the batches.

Expect: the accuracy of one_process.py, for any number of processes. Here each process trains the same net by itself.

What people get wrong: DistributedSampler repeats samples until all ranks have equally many (`--mistake
padded_evaluation`: 0.3472, not 0.3482, with 4 processes); they average the means of batches of different sizes, so that
the last, smaller batch counts as much as the others (`--mistake last_batch_mean`: 0.3521).
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
from torch.utils.data import DistributedSampler, TensorDataset

BATCH_SIZE, LEARNING_RATE, EVALUATION_BATCH = 128, 0.01, 50


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
def evaluate(net: nn.Module, images: Tensor, labels: Tensor, mistake: str | None) -> float:
    """Accuracy over all samples, the same in all processes."""
    own = list(range(dist.get_rank(), len(labels), dist.get_world_size()))
    if mistake == "padded_evaluation":
        own = list(DistributedSampler(TensorDataset(images, labels), shuffle=False))
    parts = [own[start : start + EVALUATION_BATCH] for start in range(0, len(own), EVALUATION_BATCH)]
    correct = [(net(images[ids]).argmax(1) == labels[ids]).float() for ids in parts]
    total = torch.stack([torch.cat(correct).sum(), torch.tensor(float(len(own)))])
    if mistake == "last_batch_mean":
        total = torch.stack([torch.stack([part.mean() for part in correct]).mean(), torch.tensor(1.0)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train(arguments: argparse.Namespace) -> None:
    """Trains the same net in each process, and evaluates it with all processes."""
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    for step in range(arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed)
        optimizer.zero_grad()
        F.cross_entropy(net(images[ids]), labels[ids]).backward()
        optimizer.step()
    accuracy = evaluate(net, test_images, test_labels, arguments.mistake)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mistake", choices=["padded_evaluation", "last_batch_mean"])
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run torchrun --standalone --nproc_per_node 2 before the script, not python")
    dist.init_process_group("gloo")
    train(arguments)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
