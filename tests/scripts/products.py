"""A small Llama or Mixtral in float64: what divides it in the right way differs by 1e-15, and not by a rounding error.

products.py --model experts --optimizer sgd --lengths
"""

import json
import os
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch, pad_to_longest
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, checkpoint_activations, with_losses
from accelerate_recipes.plan.tracker import COLLECTIVES

VOCABULARY, LONGEST, SHORTEST = 32, 9, 3
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "initializer_range": 0.3}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# Also what the model, its losses and the norm of the gradient compute in float32 whatever the weights are.
torch.set_default_dtype(torch.float64)
Tensor.float = Tensor.double
for norm in (LlamaRMSNorm, MixtralRMSNorm):
    norm.forward = lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@dataclass(kw_only=True)
class Config(RunConfig):
    model: Literal["tied", "untied", "experts"] = flag("tied", "which model")
    num_layers: int = flag(2, "number of layers", minimum=1)
    optimizer: Literal["adamw", "sgd"] = flag("adamw", "which optimizer")
    lengths: bool = flag(False, "samples of several lengths")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass")
    kill_in: int = flag(0, "kill process 1 in this step, once; 0: never", minimum=0)
    learning_rate: float = 1e-2
    batch_size: int = 8
    max_steps: int | None = 4
    log_every: int = 1
    eval_every: int | None = 3
    check_steps: int = 1
    max_grad_norm: float = 0.5


class Samples:
    """Tokens with the next ones as labels."""

    def __init__(self, size: int, seed: int, has_lengths: bool):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (size, LONGEST + 1), generator=generator)
        self.lengths = torch.randint(SHORTEST, LONGEST + 1, (size,), generator=generator).tolist()
        self.has_lengths = has_lengths

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not self.has_lengths:
            return {"tokens": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}
        length = self.lengths[index]
        tokens, labels = self.tokens[index, :length], self.tokens[index, 1 : length + 1]
        return {"tokens": tokens, "labels": labels, "weight": torch.tensor(float(length))}


class Counted(TorchDispatchMode):
    """Counts the collectives that this process begins."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._overloadpacket.__name__) in COLLECTIVES:
            self.counts[COLLECTIVES[name][0]] += 1
        return func(*args, **(kwargs or {}))


def make_model(config: Config) -> nn.Module:
    """A causal model whose forward returns losses, in float64."""
    sizes = SIZES | IDS | {"num_hidden_layers": config.num_layers, "tie_word_embeddings": config.model == "tied"}
    if config.model == "experts":
        model: Any = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
        model.set_experts_implementation("batched_mm")  # that of grouped_mm takes no float64
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    assert all(weight.dtype == torch.float64 for weight in model.parameters())
    if config.activation_checkpointing:
        checkpoint_activations(model)
    return with_losses(model)


def main(config: Config) -> None:
    accelerator, counted, before = start(config), Counted(), dict[int, Counter[str]]()
    model = make_model(config)
    if config.optimizer == "adamw":
        optimizer: Any = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, momentum=0.9)
    marker = config.output_dir / "was_killed"

    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        if torch.is_grad_enabled():  # an evaluation has the number of steps taken
            before.setdefault(step, counted.counts.copy())
        if config.kill_in == step > 0 and accelerator.process_index == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": model(batch["tokens"], batch["labels"])}

    train_set, eval_set = Samples(40, 1, config.lengths), Samples(11, 2, config.lengths)
    collate_fn = pad_to_longest({"labels": IGNORED}, mask=None)
    with nullcontext() if config.compile else counted:  # which nothing compiled would run under
        fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config, collate_fn=collate_fn)
    if 1 in before:  # after an evaluation, some weights are still gathered
        path = config.output_dir / f"collectives_{accelerator.process_index}.json"
        path.write_text(json.dumps(before[2] - before[1]))


if __name__ == "__main__":
    run(main, Config)
