"""Distil a teacher: a chat model learns to predict what a larger one predicts; all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/distillation.py

Data: small conversations whose answers follow rules, and a built-in teacher that knows the answers. Or your own
JSON-lines or parquet file, or a Hub id, as for finetune.py, with --teacher.
Expect: the student predicts the teacher's most probable token for 99.7 % of the held-out tokens (bytes), and the
exported model answers 49 of 50 held-out questions correctly.
Time: a minute and a half on two CPU cores.

To distil what `finetune.py` has exported, or a pretrained model on your own conversations:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/distillation.py --teacher outputs/finetune/model
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/distillation.py --data path/to/chats.jsonl \\
        --teacher path/or/hub-id-of-7B --model_name_or_path path/or/hub-id-of-1B --learning_rate 1e-5 --kd_ratio 0.5
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, run, start
from accelerate_recipes.common.data import Batch, ForwardStep, say
from accelerate_recipes.common.tasks.chat.chat_models import ChatFlags, load_chat_model, small_chat_model, write_answers
from accelerate_recipes.common.tasks.chat.chats import PAD_CHATS, ChatDataset, load_chats
from accelerate_recipes.common.tasks.models.causal_lm import CLOSE, load_pretrained, with_logits, with_perplexity
from accelerate_recipes.common.tasks.models.lora import with_adapters
from accelerate_recipes.common.tasks.models.pretrained import export_of, frozen
from accelerate_recipes.common.tasks.reading.mixture import Sources

Teacher = Callable[[Batch], Tensor]  # the logits at the positions of a batch: (batch, positions, vocabulary)


@dataclass(kw_only=True)
class Config(ChatFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "rules"
    epochs: int = 12
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    log_every: int = 50
    loss_chunk: int = 0
    messages_column: str = flag("messages", "name of the column with a list of messages")
    teacher: str | None = flag(None, "chat model with the same tokenizer (folder or Hub id)")
    temperature: float = flag(1.0, "temperature of both softmaxes; above 1 shows more of the teacher's doubts", above=0)
    beta: float = flag(
        0.0, "0: KL(teacher, student); 1: KL(student, teacher); between: a mix of both", minimum=0, maximum=1
    )
    kd_ratio: float = flag(1.0, "weight of the teacher in the loss; the labels get the rest", minimum=0, maximum=1)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalized Jensen-Shannon divergence of log-probabilities (..., tokens), shape (...) (Agarwal et al. 2024,
    GKD); with beta 0 and 1 the Kullback-Leibler divergence, in either direction."""

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def make_forward_step(config: Config, teacher: Teacher) -> ForwardStep:
    """`forward_step` for the flags. Each process holds the whole teacher."""

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The losses and metrics of each example: means over its trained tokens; its "weight" is their number."""
        logits, wanted, places = model(batch["tokens"], batch["places"]), teacher(batch), batch["places"]
        size = min(logits.shape[-1], wanted.shape[-1])  # models of a family may differ in unused rows
        logits, wanted = logits[..., :size].float(), wanted[..., :size].float()
        scaled = [F.log_softmax(each / config.temperature, -1) for each in (logits, wanted)]
        labels, best = batch["labels"].gather(1, places.clamp(min=0)), wanted.argmax(-1, keepdim=True)
        # Hinton et al. 2015: the square keeps the gradients the same size at any temperature.
        kd_loss = config.temperature**2 * divergence(scaled[0], scaled[1], config.beta)
        cross_entropy = F.cross_entropy(logits.mT, labels, reduction="none")
        # A ramp, not a jump from 0 to 1: rounding errors would move some tokens across the jump under one config only.
        gap = logits.amax(-1) - logits.gather(-1, best).squeeze(-1)
        values = {
            "loss": config.kd_ratio * kd_loss + (1 - config.kd_ratio) * cross_entropy,
            "kd_loss": kd_loss,
            "cross_entropy": cross_entropy,
            "agreement": (1 - gap / CLOSE).clamp(0, 1),
        }
        weight = batch["weight"].clamp(min=1)
        return {name: value.masked_fill(places < 0, 0).sum(1) / weight for name, value in values.items()}

    return forward_step


def known_answers(batch: Batch) -> Tensor:
    """A teacher that knows the answers, and gives bytes near the right one some probability."""
    labels = batch["labels"].gather(1, batch["places"].clamp(min=0))
    return -2.0 * (torch.arange(256, device=labels.device) - labels[..., None]).abs()


def load_teacher(path: str, config: Config, tokenizer: Any, accelerator: Accelerator) -> Teacher:
    """A frozen chat model, without gradients, on the run's device and in its precision. Raises UsageError if there
    is no such model, or if its tokens differ from those of the student's tokenizer."""
    try:
        given = path, config.max_length, config.attention, "max_length", AutoModelForCausalLM, config.trust_remote_code
        model, own = load_pretrained(*given)
    except UsageError as error:
        raise UsageError(str(error).replace("--model_name_or_path", "--teacher")) from None
    if own.get_vocab() != tokenizer.get_vocab():
        raise UsageError(f"--teacher {path} and the student differ in their tokens: use models with the same tokenizer")
    teacher = frozen(with_logits(model), accelerator)
    return torch.no_grad()(lambda batch: teacher(batch["tokens"], batch["places"]))


def build(config: Config) -> tuple[nn.Module, Any]:
    """Returns (model that returns logits, tokenizer). Raises UsageError for flags or a path that cannot be used."""
    if not config.teacher and (config.data != "rules" or config.model_name_or_path):
        raise UsageError("--teacher is missing: use the path or Hub id of a chat model with the same tokenizer")
    if config.loss_chunk:
        raise UsageError("--loss_chunk does not work here: a teacher is compared at all tokens at once: leave it out")
    model, tokenizer = load_chat_model(config, small_chat_model)
    return with_adapters(with_logits(model), config), tokenizer


def main(config: Config) -> Any:
    """Trains. Returns a function that only the main process calls afterwards: it answers held-out questions."""
    accelerator = start(config)
    model, tokenizer = build(config)
    teacher = load_teacher(config.teacher, config, tokenizer, accelerator) if config.teacher else known_answers
    sources = Sources(
        config,
        lambda data: load_chats(data, tokenizer, config.max_length, config.messages_column, config.max_samples),
    )
    say(sources.train.facts(config.max_length))
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(ChatDataset)
    fit(
        accelerator,
        model,
        optimizer,
        make_forward_step(config, teacher),
        train_set,
        eval_set,
        config,
        summarize=with_perplexity,
        collate_fn=PAD_CHATS,
        export=export_of(model, tokenizer),
    )
    return None if config.evaluate_only else partial(write_answers, config, tokenizer, sources.evaluation)


if __name__ == "__main__":
    run(main, Config)
