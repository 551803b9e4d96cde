"""A recipe that trains one of the zoo's models with one of its optimizers.

zoo.py --model NAME --optimizer NAME
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import Dataset

from common import RunConfig, fit, flag, run, start
from common.data import Batch
from common.data.batches import ForwardStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTH = int(os.environ.get("ZOO_WIDTH", 16))  # tests/large sets it
LENGTH, VOCABULARY = 8, 32


class Samples(Dataset):
    """A vector "x" of WIDTH numbers with its target "y", and LENGTH tokens with the next tokens and a class."""

    def __init__(self, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, tokens = self.x[index], self.tokens[index]
        return {"x": x, "y": x.sin().sum(), "tokens": tokens[:-1], "next": tokens[1:], "label": int(tokens[0]) % 2}


class Block(nn.Module):
    """A residual block. Tensor parallelism divides its two linear layers."""

    def __init__(self, dropout: float = 0.0, wrap: Callable[[nn.Linear], nn.Module] = lambda layer: layer):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = wrap(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = wrap(nn.Linear(2 * WIDTH, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(self.down(F.gelu(self.up(self.norm(hidden)))))


class Net(nn.Module):
    """Vectors (batch, WIDTH) -> numbers (batch,), through blocks."""

    _no_split_modules = ["Block"]
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, num_blocks: int = 2, **options: Any):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).squeeze(-1)


class CalledTwice(Net):
    """Runs its only block twice."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.blocks[0](self.stem(x)))).squeeze(-1)


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


def frozen() -> nn.Module:
    model = Net()
    model.stem.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)
    return model


SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}


def tied() -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.tasks.causal_lm import with_losses

    return with_losses(LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=32, tie_word_embeddings=True)))


def experts() -> "PreTrainedModel":
    from transformers import MixtralConfig, MixtralForCausalLM

    from common.tasks.causal_lm import with_losses

    shape = {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}
    return with_losses(MixtralForCausalLM(MixtralConfig(**SMALL, **shape)))


def encoder() -> "PreTrainedModel":
    from transformers import BertConfig, BertForSequenceClassification

    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**SMALL, **quiet, intermediate_size=32))
    for layer in model.bert.encoder.layer:  # their true gradient is zero, and Adam makes steps of the rounding noise
        layer.attention.self.key.bias.requires_grad_(False)
    return model


def encoder_decoder() -> "PreTrainedModel":
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, **shape, dropout_rate=0.0, use_cache=False)
    return T5ForConditionalGeneration(config)


def vector_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    error = model(batch["x"]) - batch["y"]
    return {"loss": error**2, "error": error.abs()}


def causal_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["next"])}


def encoder_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(input_ids=batch["tokens"]).logits
    return {"loss": F.cross_entropy(logits, batch["label"], reduction="none")}


def encoder_decoder_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["tokens"]).logits
    return {"loss": F.cross_entropy(logits.transpose(1, 2), batch["next"], reduction="none").mean(1)}


MODELS: dict[str, tuple[Callable[[], nn.Module], ForwardStep]] = {
    "tied": (tied, causal_step),
    "called_twice": (CalledTwice, vector_step),
    "frozen": (frozen, vector_step),
    "buffers": (Buffers, vector_step),
    "weight_norm": (lambda: Net(wrap=weight_norm), vector_step),
    "conv_lstm": (ConvLSTM, vector_step),
    "encoder": (encoder, encoder_step),
    "encoder_decoder": (encoder_decoder, encoder_decoder_step),
    "experts": (experts, causal_step),
    "dropout": (lambda: Net(dropout=0.3), vector_step),
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.1),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=3e-2, momentum=0.9, nesterov=True),
    "amsgrad": lambda weights: torch.optim.Adam(weights, lr=3e-3, amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, momentum=0.9, eps=1e-3),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}


@dataclass(kw_only=True)
class Config(RunConfig):
    model: Literal[*MODELS] = flag("tied", "which model")
    optimizer: Literal[*OPTIMIZERS] = flag("adamw", "which optimizer")
    batch_size: int = 8
    micro_batch_size: int | None = 2  # the masks of dropout depend on it
    max_steps: int | None = 5
    log_every: int = 1
    eval_every: int | None = 3


def main(config: Config) -> None:
    accelerator = start(config)
    build, forward_step = MODELS[config.model]
    model = build()
    optimizer = OPTIMIZERS[config.optimizer](weight for weight in model.parameters() if weight.requires_grad)
    fit(accelerator, model, optimizer, forward_step, Samples(32, seed=1), Samples(11, seed=2), config)


if __name__ == "__main__":
    run(main, Config)
