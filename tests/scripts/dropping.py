"""A recipe whose models have dropout. The flags choose one, and what `--exact_dropout` must refuse.

dropping.py --model NAME
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from common import RunConfig, fit, flag, run, start
from common.data import Batch, pad_to_longest
from common.data.batches import ForwardStep
from common.data.text import IGNORED

WIDTH, VOCABULARY = 16, 24
# With the small weights of real models, the biases of queries stay nearly zero and hold more rounding noise.
INITIAL = {"initializer_range": 0.2}


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    learning_rate: float = 0.1
    log_every: int = 1
    eval_every: int | None = 3
    model: str = flag("blocks", "name of a model")
    attention: str = flag("sdpa", "how a model of transformers attends")
    checkpointing: str = flag("", "activation checkpointing: reentrant, plain, forgetful")
    p: float = flag(0.2, "probability of dropout")
    same_length: bool = flag(False, "all texts have 9 tokens, as a pipeline needs")


class Texts(Dataset):
    """Texts of 3 to 9 tokens, so that the micro-batches of each layout have other lengths."""

    def __init__(self, size: int, seed: int, same_length: bool):
        generator = torch.Generator().manual_seed(seed)
        lengths = [9] * size if same_length else torch.randint(3, 10, (size,), generator=generator).tolist()
        self.tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        return {"tokens": tokens, "y": 4 * float(tokens.float().mean()) / VOCABULARY}


class Block(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(p), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(self.down(self.drop(F.gelu(self.up(hidden)))))


class Blocks(nn.Module):
    """Runs its only block twice, and drops in place. Tensor parallelism divides the block."""

    _no_split_modules = ["Block"]
    tp_plan = {"block.up": "colwise", "block.down": "rowwise"}

    def __init__(self, config: Config):
        super().__init__()
        self.p, self.checkpointing = config.p, config.checkpointing
        self.embedding, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Block(config.p), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = F.dropout(self.embedding(tokens), self.p, self.training, inplace=True)
        for _ in range(2):
            hidden = self._checkpointed(self.block, hidden)
        pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(F.dropout(pooled.flatten(0), self.p, self.training).view_as(pooled)).squeeze(-1)

    def _checkpointed(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if not self.checkpointing:
            return block(hidden)
        options = {"use_reentrant": self.checkpointing == "reentrant"}
        return checkpoint(block, hidden, **options, preserve_rng_state=self.checkpointing != "forgetful")


class Refused(Blocks):
    """Has, beside the blocks, something that `--exact_dropout` cannot make equal."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.kind = config.model
        if self.kind == "lstm":
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=config.p)
        elif self.kind == "time_first":
            self.lstm = nn.LSTM(WIDTH, WIDTH)
        elif self.kind == "dropout2d":
            self.spare = nn.Dropout2d(config.p)
        self.drop = nn.Dropout(config.p)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.kind == "noise" and self.training:
            hidden = hidden + torch.rand_like(hidden)
        elif self.kind == "transposed":
            hidden = self.drop(hidden.transpose(0, 1)).transpose(0, 1)
        elif self.kind == "expert":
            chosen = tokens < VOCABULARY // 2
            hidden = hidden.masked_scatter(chosen.unsqueeze(-1), self.drop(hidden[chosen]))
        elif self.kind == "weight":
            hidden = hidden @ self.drop(self.block.up.weight).T[:, :WIDTH]
        return self.head(self.block(hidden).mean(1)).squeeze(-1)


def encoder(config: Config) -> nn.Module:
    """A BERT that classifies texts."""
    from transformers import BertConfig, BertForSequenceClassification

    from common.models.encoder import BERT_TP_PLAN, freeze_key_biases

    shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    drops = {"hidden_dropout_prob": config.p, "attention_probs_dropout_prob": config.p}
    options = {"vocab_size": VOCABULARY, "attn_implementation": config.attention, **INITIAL}
    model = BertForSequenceClassification(BertConfig(**shape, **drops, **options))
    model.tp_plan = BERT_TP_PLAN
    freeze_key_biases(model)
    return model


def causal(config: Config) -> nn.Module:
    """A causal model of transformers that returns losses: GPT-2, or Llama, which can be divided."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from common.models.causal_lm import with_losses

    options = {"vocab_size": VOCABULARY, "attn_implementation": config.attention, **INITIAL}
    if config.model == "gpt2":
        drops = {"resid_pdrop": config.p, "embd_pdrop": config.p, "attn_pdrop": config.p}
        model = GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=2, n_head=2, n_positions=16, **drops, **options))
    else:
        shape = {"hidden_size": WIDTH, "num_hidden_layers": 3, "intermediate_size": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(attention_dropout=config.p, **heads, **shape, **options))
    if config.model == "around":  # each stage of a pipeline would drop here
        model.model.register_forward_hook(drop_output)
    return with_losses(model)


def drop_output(module: nn.Module, args: Any, output: Any) -> Any:
    output.last_hidden_state = F.dropout(output.last_hidden_state, 0.2, module.training)
    return output


def predict(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": (model(batch["tokens"], batch["attention_mask"]) - batch["y"].float()) ** 2}


def classify(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(input_ids=batch["tokens"], attention_mask=batch["attention_mask"]).logits
    return {"loss": F.cross_entropy(logits, (batch["y"] > 2).long(), reduction="none")}


def continue_text(model: Any, batch: Batch) -> dict[str, Tensor]:
    tokens = batch["tokens"]
    labels = F.pad(tokens, (0, 1))[:, 1:]
    return {"loss": model(tokens, labels.masked_fill(labels == 0, IGNORED))}


def main(config: Config) -> None:
    accelerator = start(config)
    forward_step: ForwardStep
    if config.model == "bert":
        model, forward_step = encoder(config), classify
    elif config.model in ("gpt2", "llama", "around"):
        model, forward_step = causal(config), continue_text
    else:
        model, forward_step = (Blocks if config.model == "blocks" else Refused)(config), predict
    if config.checkpointing and hasattr(model, "gradient_checkpointing_enable"):
        options = {"use_reentrant": config.checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, momentum=0.9)
    train_set, eval_set = (Texts(size, seed, config.same_length) for size, seed in ((26, 1), (7, 2)))
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config, collate_fn=pad_to_longest())


if __name__ == "__main__":
    run(main, Config)
