"""Train a chat model on preferences: DPO, cDPO, robust DPO, IPO, SLiC, APO, or a sum; all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/preferences.py

Data: small conversations that end with the right answer, or with the answer to the opposite question; or your own
JSON-lines or parquet file, or a Hub id, with the columns chosen and rejected, and optionally prompt and tools.
Expect: 98 % of held-out pairs have a margin in favour of the chosen answer, up from 50 %. The exported model of 0.8 M
weights gives 42 of 50 held-out answers. It starts from scratch, so it also has to learn to write the chosen answers.
Time: about two minutes on two CPU cores.

To align a model that `finetune.py` has exported, or a pretrained model on your own pairs:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/preferences.py \\
        --model_name_or_path outputs/finetune/model --learning_rate 1e-4 --epochs 1
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/preferences.py --data path/to/pairs.jsonl \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-6 --epochs 1 --activation_checkpointing
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate_recipes import Schedule, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, ForwardStep
from accelerate_recipes.common.seeds import CPU, restore_generators
from accelerate_recipes.common.tasks.chat.chat_models import (
    ChatFlags,
    load_chat_model,
    small_chat_model,
    without_dropout,
    write_answers,
)
from accelerate_recipes.common.tasks.chat.chats import PAD_CHATS
from accelerate_recipes.common.tasks.chat.preferences import (
    PairDataset,
    add_reference,
    load_pairs,
    log_probabilities,
    weights_of_losses,
)
from accelerate_recipes.common.tasks.models.causal_lm import with_losses
from accelerate_recipes.common.tasks.models.lora import with_adapters
from accelerate_recipes.common.tasks.models.pretrained import export_of
from accelerate_recipes.common.tasks.reading.mixture import Sources


def margin(ratios: Tensor) -> Tensor:
    return ratios[:, 0] - ratios[:, 1]


def logistic(difference: Tensor, flipped: float) -> Tensor:
    """The cross-entropy of a pair whose label is flipped with this probability."""
    return -(1 - flipped) * F.logsigmoid(difference) - flipped * F.logsigmoid(-difference)


# {`--loss`: function of the log-probabilities minus the reference's, shape (pairs, 2), the number of tokens of each
# answer, of the same shape, beta and the label smoothing; it returns the loss of each pair, shape (pairs,)}
LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    # Rafailov et al. 2023; with label smoothing cDPO (Mitchell 2023)
    "dpo": lambda ratios, counts, beta, noise: logistic(beta * margin(ratios), noise),
    # the same per token (Lambert et al. 2024, Tülu 3)
    "dpo_norm": lambda ratios, counts, beta, noise: logistic(beta * margin(ratios / counts), noise),
    # robust DPO (Chowdhury et al. 2024): its mean over randomly flipped labels is the loss with the right ones
    "robust": lambda ratios, counts, beta, noise: logistic(beta * margin(ratios), -noise / (1 - 2 * noise)),
    # Azar et al. 2023, per token as its authors advise TRL
    "ipo": lambda ratios, counts, beta, noise: (margin(ratios / counts) - 1 / (2 * beta)) ** 2,
    # SLiC (Zhao et al. 2023) on the rewards of DPO (Liu et al. 2023)
    "hinge": lambda ratios, counts, beta, noise: F.relu(1 - beta * margin(ratios)),
    # APO (D'Oosterlinck et al. 2024): the chosen answers are better than the model, or worse
    "apo_zero": lambda ratios, counts, beta, noise: F.sigmoid(-beta * ratios[:, 0]) + F.sigmoid(beta * ratios[:, 1]),
    "apo_down": lambda ratios, counts, beta, noise: F.sigmoid(beta * ratios[:, 0]) + F.sigmoid(-beta * margin(ratios)),
}
SMOOTHED = {"dpo", "dpo_norm", "robust"}


def preference_loss(
    ratios: Tensor, counts: Tensor, losses: dict[str, float], beta: float, smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair, shape (pairs,): a sum of `LOSSES`.

    Args:
        ratios: log-probabilities minus those of the reference, shape (pairs, 2).
        counts: number of tokens of the answers, shape (pairs, 2).
        losses: {name: weight}
        beta: as in the papers.
        smoothing: the probability that a label is flipped, below 0.5.
    """
    terms = [weight * LOSSES[name](ratios, counts.clamp(min=1), beta, smoothing) for name, weight in losses.items()]
    return torch.stack(terms).sum(0)


@dataclass(kw_only=True)
class Config(ChatFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "rules"
    epochs: int = 10
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    log_every: int = 50
    loss: str = flag("dpo", f"{', '.join(LOSSES)}; or a weighted sum of several: dpo:0.8,hinge:0.2")
    label_smoothing: float = flag(
        0.0, "share of pairs whose labels are swapped, for conservative DPO and --loss robust", minimum=0, below=0.5
    )
    beta: float = flag(0.1, "strength of the penalty for moving away from the reference model", above=0)
    sft_weight: float | None = flag(
        None, "weight of the cross-entropy of the chosen answer (default: 1 from scratch, else 0)", minimum=0
    )


def make_forward_step(config: Config) -> ForwardStep:
    """`forward_step` for the flags. Raises UsageError for an unknown loss."""
    sft_weight = float(config.model_name_or_path is None) if config.sft_weight is None else config.sft_weight
    losses = weights_of_losses(config.loss, LOSSES, SMOOTHED, config.label_smoothing)

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        policy, counts = log_probabilities(model, batch)
        ratios = policy - torch.stack([batch["reference_chosen"], batch["reference_rejected"]], 1)
        # Before the first step, policy and reference differ only by rounding errors, which show no preference.
        rewards = config.beta * ratios.detach() * (ratios.abs() > 1e-5 * policy.abs())
        loss = preference_loss(ratios, counts, losses, config.beta, config.label_smoothing)
        return {
            "loss": loss - sft_weight * policy[:, 0] / counts[:, 0].clamp(min=1),
            "reward_accuracy": (rewards[:, 0] > rewards[:, 1]).float(),
            "reward_margin": rewards[:, 0] - rewards[:, 1],
            "reward_chosen": rewards[:, 0],  # below 0: the chosen answer has become less probable
            "reward_rejected": rewards[:, 1],
            "logp_chosen": policy[:, 0].detach(),
            "logp_rejected": policy[:, 1].detach(),
        }

    return forward_step


def build(config: Config) -> tuple[nn.Module, Any]:
    """Returns (model that returns losses, tokenizer). Raises UsageError for flags or a path that cannot be used."""
    model, tokenizer = load_chat_model(config, small_chat_model)
    without_dropout(model)  # else the policy would differ from the reference, which is in eval mode, before any step
    model = with_losses(model, chunk=config.loss_chunk, longest=config.max_length)
    return with_adapters(model, config), tokenizer


def main(config: Config) -> Any:
    """Trains. Returns a function that only the main process calls afterwards: it answers held-out questions."""
    accelerator, forward_step = start(config), make_forward_step(config)
    with restore_generators(CPU):  # so that the reference gets the same initial weights
        model, tokenizer = build(config)
    sources = Sources(config, lambda data: load_pairs(data, tokenizer, config.max_length, config.max_samples))
    print_once(sources.train.facts(config.max_length))
    pairs = sources.sets(PairDataset)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)

    add_reference(accelerator, model, lambda: build(config)[0], optimizer_of, *pairs, config, PAD_CHATS)
    fit(
        accelerator,
        model,
        optimizer_of(model),
        forward_step,
        *pairs,
        config,
        collate_fn=PAD_CHATS,
        export=export_of(model, tokenizer),
    )
    return None if config.evaluate_only else partial(write_answers, config, tokenizer, sources.evaluation)


if __name__ == "__main__":
    run(main, Config)
