"""Two halves of a net on two processes: activations go forward, gradients come back, by send and receive.

    torchrun --standalone --nproc_per_node 2 recipes/plain/model_parallel.py

Idea: the second half computes the loss from the first half's output, and sends back the gradient of that output. With
`--pipeline` both compute at once, on micro-batches. `--data_parallel 2` trains two such copies on a 2 x 2 mesh.

Expect: the losses of one_process.py: equal by send and receive, to 3e-7 with `--pipeline` or `--data_parallel`.

What people get wrong: they send no gradient back, so that the first half never learns; both processes send before they
receive, and wait forever; they average gradients over all processes, though the halves have different weights.
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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
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


def forward(half: nn.Module, inputs: Tensor, stage: int, last: int) -> Tensor:
    """The output of this half. The first stage, 0, uses `inputs`; the others receive the output of the stage before."""
    if stage > 0:  # the receiver must know the shape and the type; the hook sends the gradient back
        dist.recv(inputs := torch.empty(len(inputs), 10, device=inputs.device), dist.get_rank() - 1)
        inputs.requires_grad_().register_hook(lambda gradient: dist.send(gradient, dist.get_rank() - 1))
    outputs = half(inputs)
    if stage < last:
        dist.send(outputs.detach(), dist.get_rank() + 1)
    return outputs


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    num_copies, last = arguments.data_parallel, dist.get_world_size() // arguments.data_parallel - 1
    mesh = dist.init_device_mesh(device.type, (num_copies, last + 1), mesh_dim_names=("copy", "stage"))
    copy, stage = mesh.get_local_rank("copy"), mesh.get_local_rank("stage")  # rank = copy * (last + 1) + stage
    images, labels, test_images, test_labels = (array.to(device) for array in load_data(arguments.data))
    layers = list(make_net(images.shape[1], arguments.seed).children())
    half = nn.Sequential(*layers[2 * stage : 2 if stage < last else None]).to(device)
    print(f"copy {copy}, stage {stage}: {sum(weight.numel() for weight in half.parameters())} weights\n", end="")
    optimizer = torch.optim.SGD(half.parameters(), LEARNING_RATE)
    pipeline_stage = PipelineStage(half, stage, last + 1, device, group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(pipeline_stage, arguments.pipeline or 1, F.cross_entropy)
    for step in range(arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed).chunk(num_copies)[copy]
        optimizer.zero_grad()
        if arguments.pipeline:  # only the first stage takes the images
            outputs = schedule.step(*[images[ids]] * (stage == 0), target=labels[ids])
        else:
            outputs = forward(half, images[ids], stage, last)
            if stage == last:
                F.cross_entropy(outputs, labels[ids]).backward()
            else:
                dist.recv(gradient := torch.empty_like(outputs), dist.get_rank() + 1)
                outputs.backward(gradient)
        for weight in half.parameters():  # averages over the processes that hold the same half
            dist.all_reduce(weight.grad, group=mesh.get_group("copy"))
            weight.grad /= num_copies
        optimizer.step()
        loss = F.cross_entropy(outputs, labels[ids]).detach() if stage == last else torch.zeros((), device=device)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item() / num_copies:.7f}", flush=True)
    logits = forward(half, test_images, stage, last)
    if stage == last and copy == 0:
        print(f"accuracy {(logits.argmax(1) == test_labels).float().mean():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    for name, default, choices in (("--steps", 60, None), ("--seed", 0, None), ("--data_parallel", 1, [1, 2, 4, 8])):
        parser.add_argument(name, type=int, default=default, choices=choices)
    parser.add_argument("--pipeline", type=int, nargs="?", const=4, choices=[1, 2, 4, 8, 16], help="micro-batches (4)")
    arguments = parser.parse_args()
    size = 2 * arguments.data_parallel
    if int(os.environ.get("WORLD_SIZE", 0)) not in (size, size // 2):  # half as many: the whole net in each process
        parser.error(f"--data_parallel {size // 2} needs {size} processes: run torchrun --nproc_per_node {size} first")
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort
