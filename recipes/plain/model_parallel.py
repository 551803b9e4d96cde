"""Two halves of a net on two processes: activations go forward, gradients come back, by send and receive.

    torchrun --standalone --nproc_per_node 2 recipes/plain/model_parallel.py

Idea: the process of the first half sends its output to the process of the second half, which computes the loss and
sends back the gradient of what it received. Only one of the two computes at a time; `--pipeline` cuts the batch into
micro-batches, so that both compute (torch.distributed.pipelining). `--data_parallel 2` trains two such copies on 4
processes, a 2 x 2 mesh, and averages the gradients over the processes that hold the same half.

Expect: the losses of one_process.py: equal by send and receive, to 3e-7 with `--pipeline` or `--data_parallel`. The
halves have 650 and 220 weights. Of 4 micro-batches and 2 halves, each process is idle for 1 of 5 turns, not 1 of 2.

What people get wrong: they send the output without the graph and never send a gradient back, so that the first half
does not learn; they call `send` on both sides before `recv`, and both wait; they clip each half by its own norm; they
average the gradients over all processes, which hold different weights.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group for ever
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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


def forward(half: nn.Module, images: Tensor, stage: int, num_stages: int) -> tuple[Tensor, Tensor]:
    """(input, output) of this process's half; the input comes from the process before, the output goes to the next."""
    inputs = images
    if stage > 0:  # the receiver must know the shape and the type; autograd sees a new leaf
        inputs = torch.empty(len(images), 10, device=images.device)
        dist.recv(inputs, dist.get_rank() - 1)
        inputs.requires_grad_()
    outputs = half(inputs)
    if stage < num_stages - 1:
        dist.send(outputs.detach(), dist.get_rank() + 1)
    return inputs, outputs


def forward_and_backward(half: nn.Module, images: Tensor, labels: Tensor, stage: int, num_stages: int) -> Tensor:
    """Adds the gradients of a batch to the weights of this half. Returns the mean loss; 0 before the last stage."""
    inputs, outputs = forward(half, images, stage, num_stages)
    if stage == num_stages - 1:
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
    else:
        loss, gradient = torch.zeros((), device=images.device), torch.empty_like(outputs)
        dist.recv(gradient, dist.get_rank() + 1)
        outputs.backward(gradient)
    if stage > 0:
        assert inputs.grad is not None
        dist.send(inputs.grad, dist.get_rank() - 1)
    return loss.detach()


def pipeline_step(schedule: ScheduleGPipe, images: Tensor, labels: Tensor, stage: int, num_stages: int) -> Tensor:
    """The same by torch.distributed.pipelining: one half computes a micro-batch while the other computes another."""
    losses: list[Tensor] = []
    is_last = stage == num_stages - 1
    # Only the first stage takes the images; only the last takes the labels and fills the list of losses.
    schedule.step(*[images] * (stage == 0), target=labels if is_last else None, losses=losses if is_last else None)
    return torch.stack(losses).mean().detach() if is_last else torch.zeros((), device=images.device)


def parse() -> argparse.Namespace:
    """The flags, and the place of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, or a folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data_parallel", type=int, default=1, metavar="N", help="copies of the net, each in halves")
    parser.add_argument(
        "--pipeline",
        type=int,
        nargs="?",
        const=4,
        metavar="M",
        help="torch.distributed.pipelining with M micro-batches (4)",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("type torchrun --standalone --nproc_per_node 2 before the script, not python")
    size, replicas = int(os.environ["WORLD_SIZE"]), arguments.data_parallel
    if replicas < 1 or size not in (replicas, 2 * replicas):  # size == replicas: the whole net in each process
        parser.error(f"--data_parallel {replicas} needs {2 * replicas} processes, two for each copy; here are {size}")
    micro_batches = replicas * (1 if arguments.pipeline is None else arguments.pipeline)
    if micro_batches < 1 or BATCH_SIZE % micro_batches:
        parser.error(f"{micro_batches} micro-batches over all copies do not divide the batch of {BATCH_SIZE}")
    return arguments


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains and evaluates; each process runs this."""
    replicas = arguments.data_parallel
    num_stages = dist.get_world_size() // replicas
    # Rank = copy * num_stages + stage: the halves of a copy are neighbours, on one machine where there are several.
    mesh = init_device_mesh(device.type, (replicas, num_stages), mesh_dim_names=("copy", "stage"))
    copy, stage = mesh.get_local_rank("copy"), mesh.get_local_rank("stage")
    images, labels, test_images, test_labels = load_data(arguments.data)
    # All processes make the whole net from one seed and keep a half. A net too large for that is made half by half.
    net = make_net(images.shape[1], arguments.seed)
    assert isinstance(net, nn.Sequential)
    halves = [net[:2], net[2:]] if num_stages == 2 else [net]
    if dist.get_rank() == 0:
        sizes = [sum(weight.numel() for weight in half.parameters()) for half in halves]
        print(f"weights of the stages: {sizes}, {replicas} copies", flush=True)
    half = halves[stage].to(device)
    optimizer = torch.optim.SGD(half.parameters(), LEARNING_RATE)
    if arguments.pipeline is not None:
        pipeline_stage = PipelineStage(half, stage, num_stages, device, group=mesh.get_group("stage"))
        schedule = ScheduleGPipe(pipeline_stage, arguments.pipeline, F.cross_entropy)
    for step in range(arguments.steps):
        ids = sample_ids(step, len(images), arguments.seed).chunk(replicas)[copy]
        batch = images[ids].to(device), labels[ids].to(device)
        optimizer.zero_grad()
        if arguments.pipeline is not None:
            loss = pipeline_step(schedule, *batch, stage, num_stages)
        else:
            loss = forward_and_backward(half, *batch, stage, num_stages)
        for weight in half.parameters():  # average over the processes that hold the same half
            dist.all_reduce(weight.grad, group=mesh.get_group("copy"))
            weight.grad /= replicas
        optimizer.step()
        dist.all_reduce(loss)  # the last stages know the loss; the others add 0
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item() / replicas:.7f}", flush=True)
    half.eval()
    num_correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        _, logits = forward(half, test_images[copy::replicas].to(device), stage, num_stages)
    if stage == num_stages - 1:
        num_correct += (logits.argmax(1) == test_labels[copy::replicas].to(device)).sum()
    dist.all_reduce(num_correct)
    if dist.get_rank() == 0:
        print(f"accuracy {num_correct.item() / len(test_labels):.4f}", flush=True)


def main() -> None:
    arguments = parse()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(arguments, device)
    dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort


if __name__ == "__main__":
    main()
