"""A diffusion transformer (DiT, Peebles and Xie 2023) for small images."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UsageError

FREQUENCIES = 16  # of the sine and cosine waves that encode a time
Shape = tuple[int, int, int]  # channels, height, width


class Block(nn.Module):
    """Attention and an MLP. The condition shifts and scales their inputs, and scales their outputs, at first to 0."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.head_size = width // num_heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        # Without biases: the keys' gradient would be only rounding errors, which Adam would turn into steps.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.joined = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = zero_weights(nn.Linear(width, 6 * width))

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        tokens = tokens + gate * self._attend(self.norm(tokens) * (1 + scale) + shift)
        hidden = self.up(self.norm(tokens) * (1 + mlp_scale) + mlp_shift)
        return tokens + mlp_gate * self.down(F.gelu(hidden, approximate="tanh"))

    def _attend(self, tokens: Tensor) -> Tensor:
        # Tensor parallelism gives each process some of the heads.
        heads = [
            project(tokens).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        return self.joined(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class DiT(nn.Module):
    """(images (batch, channels, height, width), times (batch,) from 0 to 1, labels (batch,)) -> images. The label
    `num_classes` stands for any class. Raises UsageError for sizes that do not divide evenly. `patch_size`: a token is
    a square with sides of this many pixels; `width`: of a token."""

    _no_split_modules = ["Block"]  # FSDP gathers one Block at a time

    def __init__(
        self, image_shape: Shape, num_classes: int, patch_size: int, width: int, num_layers: int, num_heads: int
    ):
        super().__init__()
        channels, height, width_in_pixels = image_shape
        if height % patch_size or width_in_pixels % patch_size:
            sizes = [size for size in range(1, 17) if height % size == width_in_pixels % size == 0]
            what = f"--patch_size {patch_size} does not divide images of {height} x {width_in_pixels}"
            raise UsageError(f"{what}: use one of {', '.join(map(str, sizes))}")
        if width % num_heads:
            advice = f"use --hidden_size {max(1, width // num_heads) * num_heads}"
            raise UsageError(f"--hidden_size {width} does not divide into {num_heads} heads: {advice}")
        self.patch_size, self.grid = patch_size, (height // patch_size, width_in_pixels // patch_size)
        self.enter = nn.Linear(channels * patch_size**2, width)
        self.position = nn.Parameter(0.02 * torch.randn(self.grid[0] * self.grid[1], width))
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = zero_weights(nn.Linear(width, 2 * width))
        self.leave = zero_weights(nn.Linear(width, channels * patch_size**2))

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        condition = F.silu(self.time(waves(times).to(images.dtype)) + self.label(labels))
        patches = F.pixel_unshuffle(images, self.patch_size).flatten(2).transpose(1, 2)
        tokens = self.enter(patches) + self.position
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        patches = self.leave(self.norm(tokens) * (1 + scale) + shift)
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, self.grid), self.patch_size)


def waves(times: Tensor) -> Tensor:
    """Times (batch,) as values of waves (batch, 2 × FREQUENCIES), in float32."""
    angles = math.pi / 2 * times.float().unsqueeze(1) * 2 ** (torch.arange(FREQUENCIES, device=times.device) / 4)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def zero_weights(layer: nn.Linear) -> nn.Linear:
    """The layer with weights of zero. A block then starts as the identity, which trains faster."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
