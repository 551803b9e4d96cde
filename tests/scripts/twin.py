"""`recipes/mnist.py --model mlp --optimizer sgd` by hand, without Accelerate and common/: a process group, an
all-reduce of the gradients, plain SGD.

    torchrun --nproc_per_node 2 twin.py NUM_STEPS LEARNING_RATE
"""

import json
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

BATCH_SIZE, NUM_HELD_OUT = 64, 359

num_steps, learning_rate = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

digits = load_digits()
images = torch.from_numpy((digits.images / 16 * 255).round() / 255).float().flatten(1)
labels = torch.from_numpy(digits.target).long()
rest = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[NUM_HELD_OUT:]
images, labels = images[rest], labels[rest]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
losses = []
for step in range(num_steps):
    ids = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE].chunk(world_size)[rank]
    loss = F.cross_entropy(model(images[ids]), labels[ids])
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= learning_rate * parameter.grad / world_size
    mean_loss = loss.detach()
    dist.all_reduce(mean_loss)
    losses.append(mean_loss.item() / world_size)
if rank == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
