"""Classify images of handwritten digits, on Accelerate alone: one file to copy and change.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/single_file/mnist.py

The config file says on how many processes the script runs and what they share; the result is that of one process. Six
rules make it so. People get them wrong, so each is marked where it stands.

Data: scikit-learn's 1,797 digits. `load_data` may return any two datasets whose samples are (image, label).
Expect: 99 % accuracy in a few seconds; the losses of recipes/mnist.py to 1e-5.
Verified on CPU processes, not on GPUs, under single.yaml, ddp.yaml, fsdp2.yaml and deepspeed_zero2.yaml.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from accelerate import Accelerator, DistributedType, PartialState
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

MAX_GRAD_NORM = 1.0


def load_data() -> tuple[Subset, Subset]:
    """The training set, and a fifth of the samples for evaluation: (float32 of shape (1, 8, 8) in [0, 1], label)."""
    digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images[order]) * (255 / 16)).round().float().unsqueeze(1) / 255
    samples = TensorDataset(images, torch.tensor(digits.target[order]))
    return Subset(samples, range(359, 1797)), Subset(samples, range(359))


class PooledConv(nn.Conv2d):
    """A convolution with 2 x 2 mean pooling. Pooling the kernel, not the output, takes 2.25 times fewer operations."""

    def forward(self, images: Tensor) -> Tensor:
        rows = F.pad(self.weight, (1, 1, 1, 1))
        columns = rows[..., 1:, :] + rows[..., :-1, :]
        kernel = (columns[..., 1:] + columns[..., :-1]) / 4
        return F.conv2d(images, kernel, self.bias, stride=2, padding=self.padding)


class Block(nn.Sequential):
    """Halves height and width. Not BatchNorm, which sees the samples of one process alone; not max pooling or ReLU,
    which turn rounding errors into other choices."""

    def __init__(self, in_channels: int, out_channels: int):
        convolution = PooledConv(in_channels, out_channels, kernel_size=3, padding=1)
        super().__init__(convolution, nn.GroupNorm(8, out_channels), nn.SiLU())


class ConvNet(nn.Sequential):
    """(batch, 1, 8, 8) -> logits (batch, 10)"""

    _no_split_modules = ["Block"]  # the layers that FSDP gathers one at a time

    def __init__(self) -> None:
        stem = nn.Conv2d(1, 16, kernel_size=5, padding=2), nn.GroupNorm(8, 16), nn.SiLU()
        super().__init__(*stem, Block(16, 32), Block(32, 64), nn.Flatten(), nn.Linear(256, 10))


def start(args: argparse.Namespace) -> Accelerator:
    """Joins the other processes. Without a GPU for each, they rehearse the run on the CPU."""
    kinds = DistributedType.FSDP, DistributedType.DEEPSPEED
    asked = next((kind for kind in kinds if os.environ.get(f"ACCELERATE_USE_{kind.value}") == "true"), None)
    on_cpu = torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_cpu:
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    if on_cpu and asked:
        # Left alone, Accelerate runs DDP instead of FSDP on a CPU, and DeepSpeed on a backend that does not exist.
        PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=on_cpu and not asked)
    got = accelerator.distributed_type
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)) or asked not in (None, got):
        raise SystemExit(f"Accelerate runs {got} on {accelerator.num_processes} processes, not what the config says")
    accelerator.gradient_accumulation_steps = args.accumulation
    if asked == DistributedType.DEEPSPEED:
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "gradient_accumulation_steps": args.accumulation,
            "gradient_clipping": MAX_GRAD_NORM,  # DeepSpeed clips by itself: see rule 5
        }
    torch.backends.cudnn.allow_tf32 = False  # otherwise convolutions on a GPU round to 10 bits
    return accelerator


def sample_ids(num_samples: int, args: argparse.Namespace) -> Tensor:
    """The samples of each step, shape (max_steps, batch_size)."""
    # Rule 1 of 6: they depend on the seed and the step alone. Each epoch has its own order, without a smaller batch.
    steps_per_epoch, ids = num_samples // args.batch_size, []
    for epoch in range(args.max_steps // steps_per_epoch + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
        ids.append(torch.randperm(num_samples, generator=generator)[: steps_per_epoch * args.batch_size])
    return torch.cat(ids).view(-1, args.batch_size)[: args.max_steps]


def train(args: argparse.Namespace, accelerator: Accelerator, train_set: Subset, eval_set: Subset) -> None:
    """Trains, evaluates and saves; each process runs this."""
    torch.manual_seed(args.seed)  # all processes start with the same weights
    model: nn.Module = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Rule 2 of 6: a prepared loader gives each process every num_processes-th micro-batch.
    ids = sample_ids(len(train_set), args).flatten().tolist()
    loader = accelerator.prepare(DataLoader(train_set, args.micro_batch_size, sampler=ids))
    losses: list[Tensor] = []  # of the micro-batches of a step
    for index, (images, labels) in enumerate(loader):
        # Rule 3 of 6: the learning rate depends on the step alone. A prepared scheduler advances num_processes times.
        step = index // args.accumulation
        rise = (step + 1) / (args.warmup_steps + 1)
        fall = (args.max_steps - step) / max(1, args.max_steps - args.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(rise, fall)
        with accelerator.accumulate(model):
            # Rule 4 of 6: the gradient is that of the mean over the batch. Micro-batches have equal sizes, so that the
            # mean of their means will do: `backward` takes it over micro-batches, DDP over processes.
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            # Rule 5 of 6: clip to the norm of the whole gradient, once a step. DeepSpeed ignores this line: it clips
            # by itself, at 1 unless its config says otherwise.
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
            accelerator.print(f"step {step + 1}  loss {mean.item():.7f}")
            losses.clear()
    evaluate(accelerator, model, accelerator.prepare(DataLoader(eval_set, args.micro_batch_size)))
    if args.output_dir is not None:
        accelerator.save_model(model, args.output_dir)  # model.safetensors


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> None:
    """Prints the loss and accuracy over all samples."""
    model.eval()
    parts = []
    for images, labels in loader:
        logits = model(images)
        values = F.cross_entropy(logits, labels, reduction="none"), (logits.argmax(1) == labels).float()
        # Rule 6 of 6: each sample counts once. A prepared loader repeats samples until all processes have equally many
        # batches; gather_for_metrics leaves the repeated ones out, gather keeps them.
        parts.append(accelerator.gather_for_metrics(torch.stack(values, dim=1)))
    loss, accuracy = torch.cat(parts).mean(0).tolist()
    accelerator.print(f"evaluation  loss {loss:.7f}  accuracy {accuracy:.7f}")


def main() -> None:
    train_set, eval_set = load_data()
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=176, help="optimizer steps; default: 8 epochs")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per optimizer step, over all processes")
    parser.add_argument("--micro_batch_size", type=int, help="samples per forward pass per process; default: all")
    parser.add_argument("--learning_rate", type=float, default=5e-3, help="at its peak, after --warmup_steps")
    parser.add_argument("--warmup_steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, help="for the trained weights; default: keep none")
    args, num_processes = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    # Rule 2 of 6: processes and accumulation only divide the batch of a step. Accumulation follows from the sizes.
    args.micro_batch_size = args.micro_batch_size or max(1, args.batch_size // num_processes)
    args.accumulation, rest = divmod(args.batch_size, num_processes * args.micro_batch_size)
    if rest or args.accumulation < 1 or args.batch_size > len(train_set):
        factors = f"{num_processes} processes x --micro_batch_size {args.micro_batch_size}"
        parser.error(f"--batch_size {args.batch_size}: use a multiple of {factors}, at most {len(train_set)}")
    accelerator = start(args)
    train(args, accelerator, train_set, eval_set)
    accelerator.free_memory()  # the accelerator holds the model, and the model gloo's threads
    accelerator.end_training()


if __name__ == "__main__":
    main()
