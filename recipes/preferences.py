"""Train a chat model on preferences: DPO, per answer or per token, and IPO; all weights or LoRA adapters.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/preferences.py

Data: small conversations that end with the right answer, or with that to the opposite question; or your own JSON-lines
or parquet file, or a Hub id, with the columns chosen and rejected, and perhaps prompt and tools.
Expect: 98 % of held-out pairs have a margin in favour of the chosen answer, at first 50 %. The exported model of 0.8 M
weights gives 42 of 50 held-out answers. It starts from scratch, and so also learns to write the chosen answers.
Time: about two minutes on two CPU cores.

To align a model that `finetune.py` has exported, or a pretrained model on your own pairs:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/preferences.py \\
        --model_name_or_path outputs/finetune/model --learning_rate 1e-4 --epochs 1
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/preferences.py --data path/to/pairs.jsonl \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-6 --epochs 1 --activation_checkpointing
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from accelerate_recipes import RunConfig, Schedule, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.data.mixture import parts_of
from accelerate_recipes.common.data.sets import ForwardStep
from accelerate_recipes.common.environment import has_gpu
from accelerate_recipes.common.seeds import CPU, restore_generators
from accelerate_recipes.common.tasks.causal_lm import (
    checkpoint_activations,
    load_pretrained,
    load_trained,
    with_losses,
)
from accelerate_recipes.common.tasks.chat_models import answer, small_chat_model, with_chat_template, without_dropout
from accelerate_recipes.common.tasks.chats import PAD_CHATS, Chats
from accelerate_recipes.common.tasks.lora import add_lora, check_flags
from accelerate_recipes.common.tasks.mixture import Sources
from accelerate_recipes.common.tasks.preferences import (
    PairDataset,
    add_reference,
    load_pairs,
    log_probabilities,
    preference_loss,
)
from accelerate_recipes.common.tasks.pretrained import export_of


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "rules"
    epochs: int = 10
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    log_every: int = 50
    loss: Literal["dpo", "dpo_norm", "ipo"] = flag("dpo", "Rafailov et al. 2023; the same per token; Azar et al. 2023")
    beta: float = flag(0.1, "how much it costs to leave the reference: large keeps the model near it", above=0)
    sft_weight: float | None = flag(None, "weight of the chosen answer's loss (from scratch 1, else 0)", minimum=0)
    max_samples: int | None = flag(None, "stream this many pairs of a data set and keep them, not all", minimum=1)
    max_length: int = flag(256, "tokens of a conversation beyond this number are cut", minimum=2)
    lora_rank: int = flag(0, "train adapters of this rank and no other weights; 0: train all weights", minimum=0)
    lora_targets: str = flag("all-linear", "the layers to adapt, such as q_proj,v_proj")
    loss_chunk: int = flag(8192 if has_gpu() else 1024, "tokens whose logits are in memory at once; 0: all", minimum=0)
    attention: Literal["sdpa", "eager"] = flag("sdpa", "implementation of attention")
    activation_checkpointing: bool = flag(False, "recompute activations in the backward pass, to save memory")
    model_name_or_path: str | None = flag(None, "train this causal model with its tokenizer (folder or Hub id)")
    trust_remote_code: bool = flag(False, "run Python code that the model brings: read it first")
    num_answers: int = flag(50, "held-out questions for the exported model after training", minimum=0)


def make_forward_step(config: Config) -> ForwardStep:
    """`forward_step` for the flags."""
    sft_weight = float(config.model_name_or_path is None) if config.sft_weight is None else config.sft_weight

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        policy, counts = log_probabilities(model, batch)
        ratios = policy - torch.stack([batch["reference_chosen"], batch["reference_rejected"]], 1)
        # Before the first step, policy and reference differ by rounding alone, which is no preference.
        rewards = config.beta * ratios.detach() * (ratios.abs() > 1e-5 * policy.abs())
        loss = preference_loss(ratios, counts, config.loss, config.beta)
        return {
            "loss": loss - sft_weight * policy[:, 0] / counts[:, 0].clamp(min=1),
            "reward_accuracy": (rewards[:, 0] > rewards[:, 1]).float(),
            "reward_margin": rewards[:, 0] - rewards[:, 1],
        }

    return forward_step


def build(config: Config) -> tuple[nn.Module, Any]:
    """Returns (model that returns losses, tokenizer). Raises UsageError for flags or a path that cannot be used."""
    path = config.model_name_or_path
    check_flags(path, config.lora_rank)
    if path is None:
        model, tokenizer = small_chat_model(config.max_length, config.attention)
    else:
        limits = config.max_length, config.attention, "max_length"
        model, tokenizer = load_pretrained(path, *limits, trust_remote_code=config.trust_remote_code)
        without_dropout(model)  # else the policy would differ from its reference, which is evaluated, before any step
    if config.activation_checkpointing:
        checkpoint_activations(model)
    tokenizer = with_chat_template(tokenizer, model)
    model = with_losses(model, chunk=config.loss_chunk, longest=config.max_length)
    if path is not None and config.lora_rank:
        return add_lora(model, config.lora_rank, config.lora_targets, path), tokenizer
    return model, tokenizer


def write_answers(config: Config, tokenizer: Any, pairs: Chats) -> None:
    """Prints how often the exported model gives the chosen answer, and one answer."""
    asked = pairs.select_answered(config.num_answers, step=2)
    if asked:
        answers = answer(load_trained(config.output_dir / "model"), tokenizer, asked, config.max_length)
        num_chosen = sum(found == one.answer.strip() for found, one in zip(answers, asked))
        print(f"{asked[0].question} {answers[0]}\n{num_chosen} of {len(asked)} held-out answers are the chosen")


def main(config: Config) -> Any:
    """Trains. Returns what the main process does alone afterwards: let the exported model answer held-out questions."""
    disable_progress_bar()
    accelerator = start(config)
    with restore_generators(CPU):  # for the same initial weights in the reference
        model, tokenizer = build(config)
    sources = Sources(config, lambda data: load_pairs(data, tokenizer, config.max_length, config.max_samples))
    print_once(sources.train.facts(config.max_length))
    train_set, eval_set = sources.sets(PairDataset, PairDataset)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)

    parts = parts_of(train_set, eval_set)
    add_reference(accelerator, model, lambda: build(config)[0], optimizer_of, parts, config, PAD_CHATS)
    fit(
        accelerator,
        model,
        optimizer_of(model),
        make_forward_step(config),
        train_set,
        eval_set,
        config,
        collate_fn=PAD_CHATS,
        export=export_of(model, tokenizer),
    )
    return None if config.evaluate_only else partial(write_answers, config, tokenizer, sources.evaluation)


if __name__ == "__main__":
    run(main, Config)
