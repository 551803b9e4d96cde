"""Mixed precision with autocast and GradScaler, under DDP: fp16 on a GPU, bf16 on a CPU unless `--precision` is given.

    torchrun --standalone --nproc_per_node 2 recipes/plain/mixed_precision.py

Idea: the weights stay float32, and autocast runs the matrix products of the forward and backward pass in 16 bits. The
smallest gradients would be 0 in fp16, so GradScaler multiplies the loss before the backward pass and divides the
gradients before the step. It halves the scale and skips the step whenever a gradient overflows.

Expect, on a CPU: the losses of one_process.py to 0.005 % (bf16) or 0.001 % (fp16); to 0.12 % or 0.015 % with `--steps
1500`, where the loss has fallen from 2.32 to 1.44. With `--initial_scale 1e12`, fp16 skips the first 21 steps.

What people get wrong (figures of 3000 steps): they convert the weights, and the updates round to nothing (`--mistake
bf16_weights`: 16 % accuracy instead of 87 %); they clip before `unscale_`, and the updates almost vanish (`--precision
fp16 --max_grad_norm 0.5 --mistake clip_scaled`: 10 % instead of 85 %); they scale in bf16, too, in vain.
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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: fp16 on a GPU, bf16 on a CPU")
    parser.add_argument("--initial_scale", type=float, default=2.0**16, help="of the loss, in fp16")
    parser.add_argument("--max_grad_norm", type=float, default=float("inf"))
    parser.add_argument("--mistake", choices=["bf16_weights", "clip_scaled"])
    arguments = parser.parse_args()
    if BATCH_SIZE % int(os.environ.get("WORLD_SIZE", BATCH_SIZE + 1)):
        parser.error("run torchrun --standalone --nproc_per_node 2 (or 1, 4, 8, ...) before the script")
    arguments.on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    arguments.precision = arguments.precision or ("fp16" if arguments.on_gpu else "bf16")
    needed = {"clip_scaled": "fp16", "bf16_weights": "bf16"}.get(arguments.mistake, arguments.precision)
    if arguments.precision != needed:
        parser.error(f"--mistake {arguments.mistake} needs --precision {needed}")
    return arguments


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed).to(device)
    net = net.bfloat16() if arguments.mistake == "bf16_weights" else net
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    dtype = torch.float16 if arguments.precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=arguments.precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, arguments.initial_scale, enabled=arguments.precision == "fp16")
    ddp_net = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    for step in range(arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed).chunk(size)[rank]
        with autocast:  # the forward pass only; the backward pass uses the types of the forward pass
            loss = nn.functional.cross_entropy(ddp_net(images[ids].to(device)).float(), labels[ids].to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if arguments.mistake != "clip_scaled":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), arguments.max_grad_norm)
        scaler.step(optimizer)  # skips the update if a gradient is inf or nan, in all processes alike
        scaler.update()
        dist.all_reduce(mean := loss.detach() / size)
        if rank == 0:
            print(f"step {step + 1}  loss {mean.item():.7f}", flush=True)
    with torch.no_grad(), autocast:
        accuracy = (net(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean()
    if rank == 0:
        print(f"{arguments.precision} on {device.type}, loss scale {scaler.get_scale():g}\naccuracy {accuracy:.4f}")


def main() -> None:
    arguments = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if arguments.on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if arguments.on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
