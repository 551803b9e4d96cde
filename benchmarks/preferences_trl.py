"""The losses of recipes/preferences.py against those of TRL's DPOTrainer, on one batch: pip install trl (1.13.0).

    python benchmarks/preferences_trl.py

Eight pairs, of messages (the embedded data) or of texts without a prompt; a small model with random weights as
reference, a Llama or a GPT-2, which has dropout; and a copy with noise. Both are in training mode.
"""

import copy
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_recipes.common.data import pad_to_longest
from accelerate_recipes.common.tasks.chat.chat_models import small_chat_model, without_dropout
from accelerate_recipes.common.tasks.chat.chats import Chats, encode
from accelerate_recipes.common.tasks.chat.preferences import (
    PairDataset,
    log_probabilities,
    pairs_by_rules,
    split_pair,
    weights_of_losses,
)
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, with_losses
from recipes import preferences as recipe

NAMES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm"}  # the others have the same
KINDS = ["dpo", "dpo_norm", "robust", "ipo", "hinge", "apo_zero", "apo_down", "dpo:0.8,hinge:0.2"]
NUM_PAIRS, BETA, SMOOTHING, MAX_LENGTH = 8, 0.3, 0.1, 128


def changed(model: Any) -> Any:
    """A copy with other weights: the policy after some steps."""
    policy, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.5 * weight.std().nan_to_num(1) * torch.randn(weight.shape, generator=generator)
    return policy


def rows_of(form: str) -> list[dict[str, Any]]:
    """The first pairs, as messages or as texts without a prompt."""
    rows = pairs_by_rules()[:NUM_PAIRS]
    if form == "messages":
        return rows
    prompts = ["".join(f"\n\n{one['role']}: {one['content']}" for one in row["prompt"]) for row in rows]
    sides = ("chosen", "rejected")
    return [
        {side: f"{prompt}\n\nassistant: {row[side][0]['content']}" for side in sides}
        for prompt, row in zip(prompts, rows)
    ]


@torch.no_grad()
def own_loss(policy: Any, reference: Any, tokenizer: Any, kind: str, rows: list[dict[str, Any]]) -> float:
    """The mean loss of the recipe over these pairs."""
    policy, reference = (
        with_losses(without_dropout(copy.deepcopy(one)), longest=MAX_LENGTH).train() for one in (policy, reference)
    )
    chats = [chat for row in rows for chat in split_pair(row)]
    pairs = Chats([encode(chat, tokenizer, MAX_LENGTH) for chat in chats], chats.__getitem__)
    collate = pad_to_longest({"labels": IGNORED, "places": -1}, None)

    def batch(values: Any = None) -> Any:
        dataset = PairDataset(pairs)
        dataset.reference = values
        return collate([dataset[index] for index in range(NUM_PAIRS)])

    values = log_probabilities(reference, batch())[0]
    smoothing = SMOOTHING if kind == "robust" else 0.0  # TRL's other losses have none
    config = recipe.Config(loss=kind, beta=BETA, label_smoothing=smoothing, sft_weight=0.0)
    return recipe.make_forward_step(config)(policy, batch(values))["loss"].mean().item()


def trl_loss(policy: Any, reference: Any, tokenizer: Any, kind: str, rows: list[dict[str, Any]]) -> float:
    """The loss of TRL's trainer for the same pairs, before its first step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with TemporaryDirectory() as folder:
        settings = {"per_device_train_batch_size": NUM_PAIRS, "report_to": "none", "use_cpu": True, "bf16": False}
        names, weights = zip(*weights_of_losses(kind, recipe.LOSSES, (), 0.0).items())
        kinds = {"loss_type": [NAMES.get(name, name) for name in names], "loss_weights": [*weights]}
        config = DPOConfig(folder, **kinds, beta=BETA, label_smoothing=SMOOTHING, max_length=MAX_LENGTH, **settings)
        trainer = DPOTrainer(
            copy.deepcopy(policy),
            copy.deepcopy(reference),
            config,
            train_dataset=Dataset.from_list(rows),
            processing_class=copy.deepcopy(tokenizer),
        )
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, batch).item()


def main() -> None:
    torch.manual_seed(0)
    llama, tokenizer = small_chat_model(MAX_LENGTH, "eager")
    pad, end = tokenizer.convert_ids_to_tokens([0, 3])  # bytes
    tokenizer.add_special_tokens({"pad_token": pad, "eos_token": end})
    shape = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=MAX_LENGTH, eos_token_id=3)
    print("| model | pairs | loss | recipe | TRL | relative difference |\n| --- | --- | --- | --- | --- | --- |")
    for reference, form, kind in product((llama, GPT2LMHeadModel(shape)), ("messages", "texts"), KINDS):
        data = changed(reference), reference, tokenizer, kind, rows_of(form)
        own, other = own_loss(*data), trl_loss(*data)
        difference = abs(own - other) / abs(other)
        print(f"| {type(reference).__name__} | {form} | {kind} | {own:.7f} | {other:.7f} | {difference:.0e} |")


if __name__ == "__main__":
    main()
