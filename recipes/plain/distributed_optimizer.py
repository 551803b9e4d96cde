"""ZeroRedundancyOptimizer: every process holds all weights, but only its part of the optimizer state (ZeRO stage 1).

    torchrun --standalone --nproc_per_node 2 recipes/plain/distributed_optimizer.py

Idea: ZeroRedundancyOptimizer assigns each weight tensor to one process. DDP gives the averaged gradients to all; each
process updates its tensors, keeps their momentum (`--momentum 0.9`) and broadcasts them. To `--save` them,
`consolidate_state_dict` sends all parts to rank 0; `--resume FILE` loads them on any number of processes.

Expect: the losses of one_process.py to 1e-5; with momentum those of torch.optim.SGD, also after a resume. Of the 870
values of momentum, two processes hold 640 and 230, four hold 640, 100, 100 and 30: it never divides a tensor.

What people get wrong: only rank 0 calls `consolidate_state_dict`, and it hangs; they save one process's part
(`optimizer.optim`) as the whole; they expect smaller weights and gradients, too (FSDP2's `fully_shard` divides those).
`torch.distributed.optim.DistributedOptimizer` is another thing: it updates weights in other processes through RPC. It
still works in torch 2.13, but it compiles its optimizers with TorchScript, which is deprecated.
"""

import argparse
import gzip
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
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


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed).to(device)
    ddp_net = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    sgd = {"optimizer_class": torch.optim.SGD, "lr": LEARNING_RATE, "momentum": arguments.momentum}
    optimizer = ZeroRedundancyOptimizer(net.parameters(), **sgd)
    saved: dict[str, Any] = {"step": 0}
    if arguments.resume:  # each process reads the whole state and keeps its part
        saved = torch.load(arguments.resume, map_location="cpu", weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(saved["step"], arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed).chunk(size)[rank]
        loss = F.cross_entropy(ddp_net(images[ids].to(device)), labels[ids].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / size)
        if rank == 0:
            print(f"step {step + 1}  loss {mean.item():.7f}", flush=True)
    own_state = optimizer.optim.state.values()  # `optim` is the local torch.optim.SGD
    dist.all_gather_object(held := [0] * size, sum(value.numel() for state in own_state for value in state.values()))
    if arguments.save:
        optimizer.consolidate_state_dict(to=0)  # all processes must call it
    if rank == 0:
        if arguments.save:
            whole = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}
            torch.save(whole, arguments.save)
        accuracy = (net(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean()
        print(f"accuracy {accuracy:.4f}  values of optimizer state in each process: {held}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--momentum", type=float, default=0.0, help="without it SGD has no state to divide")
    parser.add_argument("--save", type=Path, help="file for the weights and the whole optimizer state, at the end")
    parser.add_argument("--resume", type=Path, help="continue from such a file")
    arguments = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", 0))
    if size == 0 or BATCH_SIZE % size:
        parser.error(f"start with torchrun, with a number of processes that divides {BATCH_SIZE} (now {size})")
    if arguments.resume and not arguments.resume.is_file():
        parser.error(f"--resume: no file {arguments.resume}")
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
