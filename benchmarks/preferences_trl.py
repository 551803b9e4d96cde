"""The losses of recipes/preferences.py against those of TRL's DPOTrainer, on one batch: pip install trl==1.16.0.

    python benchmarks/preferences_trl.py

Each of eight pairs of the embedded data, a small model with random weights as reference, and a copy with noise.
"""

import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch

from common.data import pad_to_longest
from common.tasks.causal_lm import IGNORED, with_losses
from common.tasks.chat_models import small_chat_model
from common.tasks.preferences import PairDataset, load_pairs, log_probabilities, pairs_by_rules
from recipes import preferences as recipe

NAMES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "ipo": "ipo"}
NUM_PAIRS, BETA, MAX_LENGTH = 8, 0.3, 128


def changed(model: Any) -> Any:
    """A copy with other weights: the policy after some steps."""
    policy, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.5 * weight.std().nan_to_num(1) * torch.randn(weight.shape, generator=generator)
    return policy


@torch.no_grad()
def own_loss(policy: Any, reference: Any, tokenizer: Any, kind: str) -> float:
    """The mean loss of the recipe over the first training pairs."""
    policy, reference = (with_losses(copy.deepcopy(one), longest=MAX_LENGTH) for one in (policy, reference))
    pairs, _ = load_pairs("rules", tokenizer, MAX_LENGTH)
    collate = pad_to_longest({"labels": IGNORED, "places": -1}, None)

    def batch(values: Any = None) -> Any:
        dataset = PairDataset(pairs, places=True)
        dataset.reference = values
        return collate([dataset[index] for index in range(NUM_PAIRS)])

    values = log_probabilities(reference, batch())[0]
    config = recipe.Config(loss=kind, beta=BETA, sft_weight=0.0)  # type: ignore[arg-type]
    return recipe.make_forward_step(config)(policy, batch(values))["loss"].mean().item()


def trl_loss(policy: Any, reference: Any, tokenizer: Any, kind: str) -> float:
    """The loss of TRL's trainer for the same pairs, before its first step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 3])  # bytes
    held_out = len(pairs_by_rules()) // 20
    rows = Dataset.from_list(pairs_by_rules()[held_out : held_out + NUM_PAIRS])
    with TemporaryDirectory() as folder:
        settings = {"per_device_train_batch_size": NUM_PAIRS, "report_to": "none", "use_cpu": True, "bf16": False}
        config = DPOConfig(folder, loss_type=NAMES[kind], beta=BETA, max_length=MAX_LENGTH, **settings)
        trainer = DPOTrainer(
            copy.deepcopy(policy), copy.deepcopy(reference), config, train_dataset=rows, processing_class=tokenizer
        )
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.eval()
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, batch).item()


def main() -> None:
    torch.manual_seed(0)
    reference, tokenizer = small_chat_model(MAX_LENGTH, "eager")
    policy = changed(reference)
    print("| loss | recipe | TRL | relative difference |\n| --- | --- | --- | --- |")
    for kind in NAMES:
        own, other = (loss(policy, reference, tokenizer, kind) for loss in (own_loss, trl_loss))
        print(f"| {kind} | {own:.7f} | {other:.7f} | {abs(own - other) / abs(other):.0e} |")


if __name__ == "__main__":
    main()
