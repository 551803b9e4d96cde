"""A recipe whose evaluation generates: answers of 1 to 8 tokens, and the probability of each of their tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes import RunConfig, fit, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.evaluation import Examples, Metrics

VOCABULARY, END = 9, 0


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 4
    learning_rate: float = 1e-2
    log_every: int = 1
    eval_every: int | None = 2


class Countdowns(Dataset):
    """5 4 3 2 1 0: how long the answer is depends on the first number."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = 1 + index * 5 % (VOCABULARY - 1)
        return {"tokens": torch.arange(first, first - VOCABULARY, -1).clamp(min=END)}


def forward_step(model: torch.nn.Module, batch: Batch) -> dict[str, Tensor]:
    tokens = batch["tokens"]
    logits = model(input_ids=tokens[:, :-1]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    values = {"loss": losses.mean(1)}
    if model.training:
        return values
    told = {"do_sample": False, "max_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True}
    answers = model.generate(tokens[:, :1], attention_mask=torch.ones_like(tokens[:, :1]), **told)
    bare = model.module.generate(tokens[:, :1], attention_mask=torch.ones_like(tokens[:, :1]), **told)
    assert torch.equal(answers.sequences, bare.sequences)
    answer = answers.sequences[:, 1:]
    scores = torch.stack(answers.scores, 1).softmax(-1)  # of shape (batch, tokens, vocabulary)
    is_after_end = (answer == END).cumsum(1) > (answer == END)
    probability = scores.gather(2, answer[..., None])[..., 0].masked_fill(is_after_end, -100)
    is_end = (answer == END) & ~is_after_end
    return values | {"answer": answer.masked_fill(is_after_end, -100), "probability": probability, "is_end": is_end}


def lengths(examples: Examples) -> Metrics:
    kept = examples["answer"] != -100
    assert kept.equal(examples["probability"] >= 0) and examples["is_end"].dtype == torch.bool
    return {
        "longest": float(kept.sum(1).max()),
        "shortest": float(kept.sum(1).min()),
        "ends": float(examples["is_end"].sum()),
    }


def main(config: Config) -> None:
    accelerator = start(config)
    torch.manual_seed(2)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, Countdowns(32), Countdowns(7), config, examples=lengths)


if __name__ == "__main__":
    run(main, Config)
