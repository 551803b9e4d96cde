"""A recipe for small models, optimizers and mistakes that users bring. The flags choose one.

cases.py --case NAME --optimizer NAME
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from common import RunConfig, fit, flag, run, start
from common.data import Batch

SIZE = 40


@dataclass(kw_only=True)
class Config(RunConfig):
    case: str = flag("plain", "which model, data or mistake")
    optimizer: str = flag("AdamW", "name of an optimizer in torch.optim or in this file")
    batch_size: int = 8
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    log_every: int = 1
    eval_every: int | None = 5


class Numbers(Dataset):
    """Samples with a vector "x" of 6 numbers and a target "y"; `change` alters each sample."""

    def __init__(self, size: int = SIZE, change: Callable[[dict[str, Any], int], Any] = lambda sample, index: sample):
        generator = torch.Generator().manual_seed(1)
        self.x, self.change = torch.randn(size, 6, generator=generator), change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return self.change({"x": x, "y": x.sin().sum()}, index)


class Net(nn.Module):
    """Two layers, plus the layers or weights that a case adds."""

    _no_split_modules = ["Linear"]
    tp_plan = {"body": "colwise", "head": "rowwise"}

    def __init__(self, case: str = "plain"):
        super().__init__()
        self.case = case
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 1)
        if case == "unused":
            self.spare = nn.Linear(16, 1)
        elif case.startswith("experts"):
            self._no_split_modules = []  # FSDP cannot gather an expert that some processes skip
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        elif case == "scalar_weight":
            self.scale = nn.Parameter(torch.tensor(1.0))
        elif case == "empty_weight":
            self.nothing = nn.Parameter(torch.zeros(0, 3))
        elif case == "complex_weight":
            self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        elif case == "float64_weight":
            self.head = self.head.double()
        elif case == "bf16_weights":
            self.bfloat16()
        elif case == "dropout":
            self.drop = nn.Dropout(0.5)
        elif case == "tied":
            self.body = nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)
            self.other.weight = self.body.weight
            self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        if self.case.startswith("experts"):
            chosen = (x[:, 0] * 3).long().clamp(-1, 2) + 1
            here = [(number, expert) for number, expert in enumerate(self.experts) if (chosen == number).any()]
            hidden = hidden + sum(expert(hidden) * (chosen == number).unsqueeze(1) for number, expert in here)
            if self.case == "experts plus nothing":
                hidden = hidden + 0 * sum(weight.sum() for weight in self.experts.parameters())
        elif self.case == "tied":
            hidden = torch.tanh(self.other(hidden))
        elif self.case == "dropout":
            hidden = self.drop(hidden)
        elif self.case == "complex_weight":
            hidden = (hidden * self.turn).abs()
        output = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
        if self.case == "empty_weight":
            output = output + self.nothing.sum()
        return output * self.scale if self.case == "scalar_weight" else output


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023). The update of an element depends on the gradients of that element alone."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    weight -= group["lr"] * torch.lerp(weight.grad, mean, 0.9).sign()
                    mean.lerp_(weight.grad, 0.01)


class Language(nn.Module):
    """A transformers model with a small configuration. Makes its inputs from the vectors."""

    def __init__(self, name: str):
        super().__init__()
        import transformers

        small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.name = name
        if name == "bert":
            config = transformers.BertConfig(vocab_size=32, **small, **quiet)
            self.net = transformers.BertForSequenceClassification(config)
        elif name == "vit":
            config = transformers.ViTConfig(image_size=4, patch_size=2, num_channels=1, **small, **quiet)
            self.net = transformers.ViTForImageClassification(config)
        elif name == "gpt2":
            shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 32, "num_labels": 2}
            config = transformers.GPT2Config(
                **shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, summary_first_dropout=0, pad_token_id=0
            )
            self.net = transformers.GPT2ForSequenceClassification(config)
        elif name == "t5":
            config = transformers.T5Config(
                vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, num_labels=2
            )
            self.net = transformers.T5ForConditionalGeneration(config)
        else:
            config = transformers.Qwen2Config(
                vocab_size=32, num_key_value_heads=2, pad_token_id=0, num_labels=2, **small
            )
            self.net = transformers.Qwen2ForSequenceClassification(config)
        self._no_split_modules = self.net._no_split_modules

    def get_input_embeddings(self) -> nn.Module:
        return self.net.get_input_embeddings()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long().clamp(1, 31)
        if self.name == "vit":
            logits = self.net(x.repeat(1, 3)[:, :16].reshape(-1, 1, 4, 4)).logits
        elif self.name == "t5":
            logits = self.net(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits.mean(1)
        else:
            more = {} if self.name == "bert" else {"use_cache": False}
            logits = self.net(input_ids=tokens, **more).logits
        return logits[:, 0] - logits[:, 1]


LANGUAGE = ("bert", "vit", "gpt2", "t5", "qwen2")


def build(config: Config, accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    if config.case == "weights by rank":
        torch.manual_seed(accelerator.process_index)
    model = Language(config.case) if config.case in LANGUAGE else Net(config.case)
    kind = globals().get(config.optimizer) or getattr(torch.optim, config.optimizer)
    weights: Any = list(model.parameters())
    if config.case in ("head only", "head only, rest frozen"):
        weights = list(model.head.parameters())
        model.body.requires_grad_(config.case == "head only")
    elif config.case == "strange weight":
        weights.append(nn.Parameter(torch.zeros(3)))
    if config.optimizer == "Muon":
        weights = [weight for weight in weights if weight.ndim == 2]
    rate: Any = torch.tensor(config.learning_rate) if config.case == "tensor rate" else config.learning_rate
    return model, kind(weights, lr=rate)


def changed(config: Config, rank: int) -> tuple[Dataset, Dataset]:
    """Returns the training set and the evaluation set of a case."""
    changes = {
        "tuples": lambda sample, index: (sample["x"], sample["y"]),
        "tensors": lambda sample, index: sample["x"],
        "unequal": lambda sample, index: sample | {"x": sample["x"][: 6 - index % 2]},
        "names": lambda sample, index: sample | {"name": f"sample {index}"},
        "none": lambda sample, index: sample | {"z": None},
        "other names": lambda sample, index: sample | ({"z": 1} if index % 2 == 0 else {}),
        "column of weights": lambda sample, index: sample | {"weight": torch.ones(1)},
        "sample by rank": lambda sample, index: sample | {"x": sample["x"] + rank},
    }
    change = changes.get(config.case, lambda sample, index: sample)
    return Numbers(SIZE + rank * (config.case == "length by rank"), change), Numbers(13, change)


def main(config: Config) -> None:
    accelerator = start(config)
    model, optimizer = build(config, accelerator)
    noise = torch.Generator().manual_seed(0)

    def forward_step(model: nn.Module, batch: Batch) -> Any:
        output, y = model(batch["x"]), batch["y"]
        error = (output - y) ** 2
        if config.case == "asks for the mode":
            error = error + model.training * torch.rand((), generator=noise)
        values: dict[str, Any] = {"loss": error}
        mistakes: dict[str, Callable[[], Any]] = {
            "column": lambda: {"loss": error.unsqueeze(-1)},
            "square": lambda: {"loss": (output.unsqueeze(-1) - y) ** 2},
            "mean": lambda: {"loss": error.mean()},
            "no loss": lambda: {"error": error},
            "no dict": lambda: error,
            "metric": lambda: values | {"accuracy": error.mean()},
            "number": lambda: values | {"accuracy": 0.5},
            "detached": lambda: {"loss": error.detach()},
            "tokens": lambda: {"loss": F.relu(batch["x"]) * error.unsqueeze(-1)},
        }
        return mistakes.get(config.case, lambda: values)()

    def summarize(means: dict[str, float]) -> dict[str, Any]:
        return means | ({"verdict": "good"} if config.case == "verdict" else {})

    train_set, eval_set = changed(config, accelerator.process_index)
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config, summarize)


if __name__ == "__main__":
    run(main, Config)
