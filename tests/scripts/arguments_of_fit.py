"""A recipe that uses all that `fit` can be told: sequences of different lengths, two evaluation sets, an order and a
schedule of its own, and metrics of all examples."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch, pad_to_longest
from accelerate_recipes.common.evaluation import Examples, Metrics

NUM_CLASSES = 3


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    learning_rate: float = 3e-2
    log_every: int = 2
    eval_every: int | None = 4
    power: float = flag(1.0, "of the schedule")
    order: str = flag("short first", "of the samples: short first, balanced, bad")


class Sequences(Dataset):
    """Sequences of 2 to 9 tokens; the label is the number of tokens below 4, modulo 3."""

    def __init__(self, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 10, (size,), generator=generator).tolist()
        self.tokens = [torch.randint(1, 8, (length,), generator=generator) for length in lengths]
        self.labels = [int((tokens < 4).sum()) % NUM_CLASSES for tokens in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return {"tokens": self.tokens[index], "label": self.labels[index]}


class Net(nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(tokens))) * mask.unsqueeze(-1)
        return self.head(hidden.sum(1))


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(batch["tokens"], batch["attention_mask"])
    predicted = logits.argmax(-1)
    return {
        "loss": F.cross_entropy(logits, batch["label"], reduction="none"),
        "accuracy": (predicted == batch["label"]).float(),
        "predicted": predicted,
        "label": batch["label"],
    }


def macro_f1(examples: Examples) -> Metrics:
    scores = []
    for number in range(NUM_CLASSES):
        predicted, label = examples["predicted"] == number, examples["label"] == number
        scores.append(2 * (predicted & label).sum() / (predicted.sum() + label.sum()).clamp(min=1))
    return {"macro_f1": float(torch.stack(scores).mean())}


def main(config: Config) -> None:
    accelerator = start(config)
    train_set, model = Sequences(50, seed=1), Net()

    def sampler(epoch: int, generator: torch.Generator) -> Tensor:
        if config.order == "bad":
            return torch.arange(51)
        if config.order == "balanced":
            weights = 1 / torch.bincount(torch.tensor(train_set.labels))[train_set.labels]
            return torch.multinomial(weights, 64, replacement=True, generator=generator)
        lengths = torch.tensor([len(tokens) for tokens in train_set.tokens])
        return (lengths + torch.rand(len(lengths), generator=generator)).argsort()

    fit(
        accelerator,
        model,
        torch.optim.AdamW(model.parameters(), config.learning_rate),
        forward_step,
        train_set,
        {"seen": train_set, "new": Sequences(23, seed=2)},
        config,
        examples=macro_f1,
        collate_fn=pad_to_longest(),
        sampler=sampler,
        schedule=lambda step, num_steps, warmup_steps: (1 - step / num_steps) ** config.power,
    )


if __name__ == "__main__":
    run(main, Config)
