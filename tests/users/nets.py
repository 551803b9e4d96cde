"""Small models that users write."""

from collections.abc import Callable
from typing import Any

import torch
from samples import WIDTH
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from accelerate_recipes.common.environment import rank


class Block(nn.Module):
    """A residual block. Tensor parallelism divides its two linear layers; `between` is called between them."""

    def __init__(
        self,
        dropout: float = 0.0,
        wrap: Callable[[nn.Linear], nn.Module] = lambda layer: layer,
        between: Callable[[Tensor], Tensor] = F.gelu,
        widens: int = 1,
    ):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = wrap(nn.Linear(WIDTH, widens * 2 * WIDTH))
        self.down = wrap(nn.Linear(2 * WIDTH, WIDTH))
        self.drop, self.between = nn.Dropout(dropout), between

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(self.down(self.between(self.up(self.norm(hidden)))))


class Net(nn.Module):
    """Vectors (batch, WIDTH) -> numbers (batch,), through blocks."""

    _no_split_modules = ["Block"]
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, num_blocks: int = 2, **options: Any):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def hidden(self, x: Tensor) -> Tensor:
        """What the head takes, (batch, WIDTH)."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x)).squeeze(-1)


class CalledTwice(Net):
    """Runs its only block twice."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)

    def hidden(self, x: Tensor) -> Tensor:
        return self.blocks[0](super().hidden(x))


class Buffers(Net):
    """Uses buffers of six types, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH) % 5 > 0)
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("table", torch.rand(WIDTH).half())
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH), torch.rand(WIDTH)))
        self.register_buffer("shift", torch.rand(WIDTH).bfloat16(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x[:, self.order] * self.mask * self.scale + self.table + self.shift).float()
        return super().forward((x * self.turn).real)


class ConvLSTM(nn.Module):
    """Takes the vector as a sequence."""

    _no_split_modules = ["LSTM"]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, kernel_size=3, padding=1)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        sequence = F.gelu(self.conv(x.unsqueeze(1))).transpose(1, 2)
        return self.head(self.lstm(sequence)[0][:, -1]).squeeze(-1)


class Routed(Net):
    """Each sample takes one of four experts. FSDP cannot gather an expert that some processes skip."""

    _no_split_modules = []

    def __init__(self, plus_nothing: bool):
        super().__init__()
        self.experts, self.plus_nothing = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), plus_nothing

    def hidden(self, x: Tensor) -> Tensor:
        hidden, chosen = super().hidden(x), (x[:, 0] * 3).long().clamp(-1, 2) + 1
        here = [(number, expert) for number, expert in enumerate(self.experts) if (chosen == number).any()]
        hidden = hidden + sum(expert(hidden) * (chosen == number).unsqueeze(1) for number, expert in here)
        if self.plus_nothing:  # then each expert takes part in each pass
            hidden = hidden + 0 * sum(weight.sum() for weight in self.experts.parameters())
        return hidden


class OfSomeSamples(Net):
    """The content of a batch says how many samples its blocks get. They make float32 of bf16 and double it in place.
    FSDP2 gathers all of them at a time."""

    _no_split_modules = ["Sequential"]

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.blocks = nn.Sequential(*self.blocks)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, args: (args[0].float().mul_(2),))

    def hidden(self, x: Tensor) -> Tensor:
        number, hidden = max(1, int((x[:, 0] > 0).sum())), self.stem(x).bfloat16()
        return torch.cat([self.blocks(hidden[:number]), hidden[number:].float()])


class CarriesMore(Net):
    """Its blocks also give a mean, which it uses after the last one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda block, args, output: (output, output.mean(1, keepdim=True)))

    def hidden(self, x: Tensor) -> Tensor:
        hidden, means = self.stem(x), []
        for block in self.blocks:
            hidden, mean = block(hidden)
            means.append(mean)
        return hidden + torch.stack(means).mean(0)


class Skips(Net):
    """What the head gets also depends on the output of the first block, where a pipeline of two stages is cut."""

    def hidden(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.stem(x))
        early = first * 1
        return self.blocks[1](first) + early.tanh()


class SharedWeight(Net):
    """Two layers far from each other share a weight."""

    _no_split_modules = ["Linear"]

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.stem.weight

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(torch.tanh(self.stem(x))))


class PaddedEncoder(nn.Module):
    """torch's encoder over two or three tokens, the mean of all positions. In evaluation its fast kernels set padding
    to 0, unless the padding of one sample of the micro-batch stands before a token."""

    _no_split_modules = ["TransformerEncoderLayer"]
    tp_plan = {"encoder.layers.*.linear1": "colwise", "encoder.layers.*.linear2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens, padding = torch.stack([x, -x, x.flip(1)], 1), torch.zeros(len(x), 3, dtype=torch.bool, device=x.device)
        padding[:, 2], padding[:, 0] = x[:, 0] > 0.3, x[:, 0] < -1
        return self.head(self.encoder(tokens, src_key_padding_mask=padding).mean(1)).squeeze(-1)


class InBfloat16(Net):
    """Its weights are bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class KnowsTheMode(Net):
    """Adds noise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.training * torch.rand((), generator=self.generator)


def frozen() -> nn.Module:
    model = Net()
    model.stem.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)
    return model


def all_but_head_frozen() -> nn.Module:
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def shared_layer() -> nn.Module:
    model = Net()
    model.blocks[1].down = model.blocks[0].down
    return model


def shared_between_blocks() -> nn.Module:
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def other_in_each_process() -> nn.Module:
    torch.manual_seed(rank())
    return Net()


ZOO: dict[str, Callable[[], nn.Module]] = {
    "called_twice": CalledTwice,
    "frozen": frozen,
    "buffers": Buffers,
    "weight_norm": lambda: Net(wrap=weight_norm),
    "conv_lstm": ConvLSTM,
    "dropout": lambda: Net(dropout=0.3),
}
NETS = ZOO | {
    "net": Net,
    "routed": lambda: Routed(plus_nothing=False),
    "of_some_samples": OfSomeSamples,
    "carries_more": CarriesMore,
    "skips": Skips,
    "routed_plus_nothing": lambda: Routed(plus_nothing=True),
    "shared_weight": SharedWeight,
    "shared_layer": shared_layer,
    "shared_between_blocks": shared_between_blocks,
    "padded_encoder": PaddedEncoder,
    "bf16_weights": InBfloat16,
    "knows_the_mode": KnowsTheMode,
    "all_but_head_frozen": all_but_head_frozen,
    "other_in_each_process": other_in_each_process,
}
