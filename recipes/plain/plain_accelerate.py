"""Accelerate alone, in one file: train, accumulate, clip, schedule, evaluate, resume and export under any config.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/plain/plain_accelerate.py

Idea: the config file says what the processes share, and `Accelerator.prepare` wraps net, optimizer, loader and schedule
for it. The script divides its batch by the number of processes, so the global batch stays 128. `save_state` and
`load_state` keep all that a run needs to go on, and `skip_first_batches` finds the place in the data.

Expect: the losses of one_process.py to 1e-6, with any number of processes, any `--accumulate` and each config below.
`--steps 3000` reaches 87 % on the digits. After `--resume` the losses are those of the uninterrupted run: with two
processes digit for digit, with four to 1e-5. Verified on CPU processes only: single.yaml, ddp.yaml and fsdp2.yaml (2
and 4 processes) and deepspeed_zero2.yaml (2 processes; DeepSpeed first compiles an extension, which takes minutes). On
a CPU, Accelerate needs the lines in `start` for the last three. Nothing was verified on a GPU.

What people get wrong: they launch on a machine without a GPU, and each process trains alone, without an error; they
leave the batch size as it is, so the global batch grows with the number of processes; a prepared schedule steps once
per process, so it ends too early; they set `max_grad_norm` in the script, but DeepSpeed clips at 1 unless its config
says otherwise; they evaluate with `gather`, which counts the samples that fill the last batch twice.
"""

import argparse
import gzip
import math
import os
from pathlib import Path

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group for ever
from accelerate import Accelerator, DistributedType, PartialState
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 128


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


def learning_rate_factor(schedule: str, step: int, num_steps: int, warmup_steps: int) -> float:
    """The share of `--learning_rate` that step `step`, counted from 0, uses."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    left = (num_steps - step) / max(1, num_steps - warmup_steps)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[schedule]


def start(accumulate: int, max_grad_norm: float) -> Accelerator:
    """Joins the other processes; on the CPU through gloo if there is no GPU for each process of this machine."""
    asks_fsdp, asks_deepspeed = (
        os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" for name in ("FSDP", "DEEPSPEED")
    )
    device = torch.accelerator.current_accelerator(check_available=True)
    enough = torch.accelerator.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_cpu = device is None or device.type == "mps" or not enough
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, once imported, warns about a missing GPU
    if on_cpu and (asks_fsdp or asks_deepspeed):
        # Left alone, Accelerate runs DDP instead of FSDP on a CPU, and DeepSpeed on a backend that does not exist.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state = PartialState(backend="gloo")
        if asks_fsdp:
            state.distributed_type = DistributedType.MULTI_GPU  # the kind of run that Accelerate turns into FSDP
    # Without the last argument, a prepared schedule steps once per process, so n processes run through it n times.
    accelerator = Accelerator(
        cpu=on_cpu and not (asks_fsdp or asks_deepspeed),
        gradient_accumulation_steps=accumulate,
        step_scheduler_with_optimizer=False,
    )
    got = accelerator.distributed_type
    if (
        accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1))
        or asks_fsdp != (got == DistributedType.FSDP)
        or asks_deepspeed != (got == DistributedType.DEEPSPEED)
    ):
        raise SystemExit(f"Accelerate runs {got} on {accelerator.num_processes} processes, not what the config says")
    if asks_deepspeed:  # DeepSpeed's engine accumulates and clips itself; Accelerate's default clips at 1
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": max_grad_norm,
        }
    return accelerator


@torch.no_grad()
def evaluate(accelerator: Accelerator, net: nn.Module, loader: DataLoader) -> float:
    """Accuracy over all samples. Accelerate repeats samples to fill the last batch; `gather_for_metrics` drops them."""
    net.eval()
    correct = [accelerator.gather_for_metrics(net(images).argmax(1) == labels) for images, labels in loader]
    net.train()
    return torch.cat(correct).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    """Parses the flags; a bad combination ends the run with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--lr_schedule", choices=["constant", "linear", "cosine"], default="constant")
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--max_grad_norm", type=float, default=0.0, help="0 does not clip")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument(
        "--output_dir", type=Path, help="for checkpoints and the trained weights; default: save nothing"
    )
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0 saves none")
    parser.add_argument("--resume", type=Path, help="continue from this folder, for example OUTPUT_DIR/step_30")
    arguments = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", 1))
    if arguments.accumulate < 1 or BATCH_SIZE % (size * arguments.accumulate):
        parser.error(
            f"{size} processes x --accumulate {arguments.accumulate} does not divide the batch of {BATCH_SIZE}"
        )
    if arguments.save_every and arguments.output_dir is None:
        parser.error("--save_every needs --output_dir")
    if arguments.resume is not None and not arguments.resume.is_dir():
        parser.error(f"--resume: no folder {arguments.resume}")
    return arguments


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    """Trains, evaluates and exports; each process runs this."""
    images, labels, test_images, test_labels = load_data(arguments.data)
    net = make_net(images.shape[1], arguments.seed)
    net._no_split_modules = ["Linear"]  # type: ignore[assignment]  # the layers that FSDP gathers one at a time
    optimizer_class = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[arguments.optimizer]
    optimizer = optimizer_class(net.parameters(), arguments.learning_rate)
    schedule, total, warmup = arguments.lr_schedule, arguments.steps, arguments.warmup_steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(schedule, step, total, warmup)
    )
    # A prepared loader gives each process every n-th micro-batch: together they hold the ids of the global batch.
    ids = [i for step in range(total) for i in sample_ids(step, len(images), arguments.seed).tolist()]
    micro_batch_size = BATCH_SIZE // (accelerator.num_processes * arguments.accumulate)
    loader = DataLoader(TensorDataset(images, labels), micro_batch_size, sampler=ids)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    test_loader = accelerator.prepare_data_loader(DataLoader(TensorDataset(test_images, test_labels), 100))
    step, mean = 0, torch.zeros((), device=accelerator.device)
    if arguments.resume is not None:
        accelerator.load_state(str(arguments.resume))
        step = scheduler.state_dict()["last_epoch"]
        loader = accelerator.skip_first_batches(loader, step * arguments.accumulate)
    for batch_images, batch_labels in loader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(batch_images), batch_labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients and arguments.max_grad_norm:
                accelerator.clip_grad_norm_(net.parameters(), arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        mean += loss.detach() / arguments.accumulate
        if not accelerator.sync_gradients:
            continue
        scheduler.step()
        step += 1
        accelerator.print(f"step {step}  loss {accelerator.reduce(mean, 'mean').item():.7f}", flush=True)
        mean = torch.zeros_like(mean)
        if arguments.save_every and step % arguments.save_every == 0:
            accelerator.save_state(str(arguments.output_dir / f"step_{step}"))
    accelerator.print(f"accuracy {evaluate(accelerator, net, test_loader):.4f}", flush=True)
    if arguments.output_dir is not None:
        accelerator.save_model(net, str(arguments.output_dir))  # model.safetensors, also from sharded weights


def main() -> None:
    arguments = parse_arguments()
    accelerator = start(arguments.accumulate, arguments.max_grad_norm)
    train(arguments, accelerator)
    accelerator.free_memory()  # it holds the net and the optimizer, too
    # Destroys the process group. What `train` made is freed, so gloo's threads end here; later they may abort.
    accelerator.end_training()


if __name__ == "__main__":
    main()
