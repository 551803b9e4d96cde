"""Fit a linear model by stochastic gradient descent, on Accelerate alone: one file to copy and change.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/single_file/linear_regression.py

The config file says on how many processes the script runs and what they share; the result is that of one process. Six
rules make it so. People get them wrong, so each is marked where it stands.

Data: scikit-learn's diabetes dataset (442 patients x 10 measurements).
Expect: R² 0.518, as the closed form has, in a few seconds; the losses of recipes/linear_regression.py to 1e-5.
Verified on CPU processes, not on GPUs, under single.yaml, ddp.yaml, fsdp2.yaml and deepspeed_zero2.yaml.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from accelerate import Accelerator, DistributedType, PartialState
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def load_data() -> tuple[Tensor, Tensor]:
    """Features of shape (442, 10) and targets of shape (442, 1), each column with mean 0 and variance 1."""
    features, target = map(torch.from_numpy, load_diabetes(return_X_y=True, scaled=False))
    data = torch.cat([features, target.unsqueeze(1)], dim=1)
    data = ((data - data.mean(0)) / data.std(0, correction=0)).float()
    return data[:, :-1], data[:, -1:]


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
            "gradient_clipping": 0.0,  # Rule 5 of 6: DeepSpeed clips by itself, at 1 unless its config says otherwise
        }
    return accelerator


def sample_ids(num_samples: int, args: argparse.Namespace) -> Tensor:
    """The samples of each step, shape (max_steps, batch_size)."""
    # Rule 1 of 6: they depend on the seed and the step alone. Each epoch has its own order, without a smaller batch.
    steps_per_epoch, ids = num_samples // args.batch_size, []
    for epoch in range(args.max_steps // steps_per_epoch + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
        ids.append(torch.randperm(num_samples, generator=generator)[: steps_per_epoch * args.batch_size])
    return torch.cat(ids).view(-1, args.batch_size)[: args.max_steps]


def train(args: argparse.Namespace, accelerator: Accelerator, features: Tensor, target: Tensor) -> None:
    """Trains, evaluates and saves; each process runs this."""
    torch.manual_seed(args.seed)  # all processes start with the same weights
    model = nn.Linear(features.shape[1], 1)
    optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(DataLoader(TensorDataset(features, target), args.micro_batch_size))
    features, target = features.to(accelerator.device), target.to(accelerator.device)
    # Rule 2 of 6: of the micro-batches of a step, each process takes every num_processes-th.
    shape = args.max_steps, args.accumulation, accelerator.num_processes, args.micro_batch_size
    for step, own in enumerate(sample_ids(len(features), args).view(shape)[:, :, accelerator.process_index]):
        # Rule 3 of 6: the learning rate depends on the step alone. A prepared scheduler advances num_processes times.
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * step / args.max_steps))
        losses = []
        for ids in own:
            with accelerator.accumulate(model):
                # Rule 4 of 6: the gradient is that of the mean over the batch. Micro-batches have equal sizes, so that
                # the mean of their means will do: `backward` takes it over micro-batches, DDP over processes.
                losses.append(nn.functional.mse_loss(model(features[ids]), target[ids]))
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(torch.stack(losses).detach().mean(), "mean")
        accelerator.print(f"step {step + 1}  loss {mean.item():.7f}")
    with torch.no_grad():
        # Rule 6 of 6: each sample counts once. A prepared loader repeats samples until all processes have equally many
        # batches; gather_for_metrics leaves the repeated ones out, gather keeps them.
        errors = [accelerator.gather_for_metrics((model(x) - y).square()) for x, y in loader]
    loss = torch.cat(errors).mean()
    accelerator.print(f"evaluation  loss {loss:.7f}  r2 {1 - loss / target.var(correction=0):.7f}")
    if args.output_dir is not None:
        accelerator.save_model(model, args.output_dir)  # model.safetensors


def main() -> None:
    features, target = load_data()
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per optimizer step, over all processes")
    parser.add_argument("--micro_batch_size", type=int, help="samples per forward pass per process; default: all")
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, help="for the trained weights; default: keep none")
    args, num_processes = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    # Rule 2 of 6: processes and accumulation only divide the batch of a step. Accumulation follows from the sizes.
    args.micro_batch_size = args.micro_batch_size or max(1, args.batch_size // num_processes)
    args.accumulation, rest = divmod(args.batch_size, num_processes * args.micro_batch_size)
    if rest or args.accumulation < 1 or args.batch_size > len(features):
        factors = f"{num_processes} processes x --micro_batch_size {args.micro_batch_size}"
        parser.error(f"--batch_size {args.batch_size}: use a multiple of {factors}, at most {len(features)}")
    accelerator = start(args)
    train(args, accelerator, features, target)
    accelerator.free_memory()  # the accelerator holds the model, and the model gloo's threads
    accelerator.end_training()


if __name__ == "__main__":
    main()
