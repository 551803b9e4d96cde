"""One process, PyTorch alone: the loop that the other files of this folder divide among processes.

    python recipes/plain/one_process.py

Idea: for each step take a batch, compute the gradient of its mean loss, and let the optimizer step. The samples of
step k depend only on the seed and k, so any number of processes can divide the same batch. The other files print the
same losses; that is how you see that they are right.

Expect: the loss falls from 2.317 to 2.310 in 60 steps, in less than a second: the net and the learning rate are small.
`--steps 3000` reaches 87 % accuracy on the embedded digits. `--data` takes a folder with MNIST's four IDX files.

What people get wrong: they shuffle with an unseeded generator and then cannot compare two runs; they report the loss
of the last batch as the loss of the epoch; they leave the model in training mode while they evaluate.
"""

import argparse
import gzip
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

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


def main() -> None:
    """Trains and evaluates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    images, labels, test_images, test_labels = load_data(arguments.data)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    net = make_net(images.shape[1], arguments.seed).to(device)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    for step in range(arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed)
        loss = F.cross_entropy(net(images[ids].to(device)), labels[ids].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}  loss {loss.item():.7f}")
    net.eval()
    with torch.no_grad():
        accuracy = (net(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean()
    print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
