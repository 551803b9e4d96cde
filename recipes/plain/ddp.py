"""DistributedDataParallel under torchrun: the usual way to train one net on several devices.

    torchrun --standalone --nproc_per_node 2 recipes/plain/ddp.py

Idea: it broadcasts the weights at the start, and averages the gradients during the backward pass. `no_sync` leaves out
the averaging for all micro-batches but the last. Rank 0 writes checkpoints, and all ranks read them.

Expect: the losses of one_process.py to 1e-5, for 1, 2 and 4 processes and any accumulation, also after a resume.

What people get wrong: they do not divide by the number of micro-batches; all ranks write the same checkpoint file.
"""

import argparse
import gzip
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    for name, default in (("--steps", 60), ("--seed", 0), ("--accumulate", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--checkpoint", type=Path, default="ddp.safetensors")
    parser.add_argument("--save_every", type=int, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run torchrun --standalone --nproc_per_node 2 before the script, not python")
    num_parts = int(os.environ["WORLD_SIZE"]) * arguments.accumulate
    if num_parts < 1 or BATCH_SIZE % num_parts:
        parser.error(f"processes x --accumulate is {num_parts}, which does not divide the batch of {BATCH_SIZE}")
    if arguments.resume and not arguments.checkpoint.exists():
        parser.error(f"--resume: no checkpoint {arguments.checkpoint}")
    return arguments


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed).to(device)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    tensors = load_file(arguments.checkpoint) if arguments.resume else net.state_dict()
    start = int(tensors.pop("step", 0))
    net.load_state_dict(tensors)
    ddp_net = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    for step in range(start, arguments.steps):
        own_ids = sample_ids(step, len(images), arguments.seed).chunk(size)[rank]
        mean = torch.zeros((), device=device)
        for index, ids in enumerate(own_ids.chunk(arguments.accumulate), 1):
            with nullcontext() if index == arguments.accumulate else ddp_net.no_sync():
                loss = F.cross_entropy(ddp_net(images[ids].to(device)), labels[ids].to(device)) / arguments.accumulate
                loss.backward()
            mean += loss.detach() / size
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}  loss {mean.item():.7f}", flush=True)
            if arguments.save_every and (step + 1) % arguments.save_every == 0:
                part = arguments.checkpoint.with_suffix(".part")  # a kill leaves no half file under the real name
                save_file(net.state_dict() | {"step": torch.tensor(step + 1)}, part)
                part.rename(arguments.checkpoint)
    if rank == 0:  # evaluation.py divides this among the processes
        accuracy = (net(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean()
        print(f"accuracy {accuracy:.4f}", flush=True)


def main() -> None:
    arguments = parse()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
