"""What the peers share: a model and rows in files, the settings of a Trainer, and its losses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from accelerate_recipes.common.tasks.chat.chat_models import small_chat_model
from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

BATCH, MAX_LENGTH, LEARNING_RATE, HELD_OUT = 8, 192, 1e-4, 2
LONGEST_TEXT = 64  # tokens, of an encoder


def write_model(folder: Path) -> None:
    """A Llama of 13 million weights with random ones, and a tokenizer of bytes with a chat template."""
    torch.manual_seed(0)
    _, tokenizer = small_chat_model(MAX_LENGTH, "sdpa")
    pad, end = tokenizer.convert_ids_to_tokens([0, 3])
    tokenizer.add_special_tokens({"pad_token": pad, "eos_token": end})
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=5,
        num_attention_heads=6,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=0,
        eos_token_id=3,
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def write_encoder(folder: Path, steps: int, make: Callable[[BertConfig], PreTrainedModel], **shape: Any) -> list[str]:
    """A BERT of 11 million weights with random ones, of this kind and shape, and a tokenizer. Returns the texts of so
    many steps, whose words are its tokens."""
    texts = [" ".join(f"word{row * place % 977}" for place in range(5, 20 + row % 40)) for row in range(steps * BATCH)]
    tokenizer = word_tokenizer(texts, 1024)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=LONGEST_TEXT,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **shape,
    )
    make(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return texts


def drawn_order(number: int) -> list[int]:
    """The samples in the order in which a recipe draws them with seed 0."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(0)).tolist()


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The rows for the recipe, and for the peer in the order in which the recipe draws them."""
    drawn = [rows[row] for row in drawn_order(len(rows))]
    (folder / "data").mkdir()
    for name, chosen in (("data/train", rows), ("data/test", rows[:HELD_OUT]), ("drawn", drawn)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)) + "\n")


def drawn_rows(folder: Path) -> list[dict[str, Any]]:
    """In the order in which the recipe draws them."""
    return list(map(json.loads, (folder / "drawn.jsonl").read_text().splitlines()))


def question(number: int) -> list[dict[str, str]]:
    """Of a length of its own."""
    return [{"role": "user", "content": f"What follows {number}? " + "Think of it. " * (number % 7)}]


def answer(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"{number} comes next" + ", as you know" * (number % 5) + "."}]


def flags_of_chats(folder: Path) -> str:
    """Of a recipe that trains the model of `write_model`."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} --max_length {MAX_LENGTH} "
        f"--learning_rate {LEARNING_RATE} --num_answers 0"
    )


def train_chats(trainer_type: type, config: Any, folder: Path, num_models: int = 1) -> None:
    """Trains a Trainer of TRL, and prints its losses.

    Args:
        trainer_type: of TRL.
        config: for it.
        folder: with the model and the rows.
        num_models: that it is given: that to train, and perhaps its reference.
    """
    from datasets import Dataset

    trainer = type("Trainer", (InOrder, trainer_type), {})(
        *(AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(num_models)),
        args=config,
        train_dataset=Dataset.from_list(drawn_rows(folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    print(json.dumps(trainer.losses))


def settings(folder: Path, steps: int) -> dict[str, Any]:
    """Of a Trainer that does what the recipe does."""
    return {
        "output_dir": str(folder / "peer"),
        "per_device_train_batch_size": BATCH,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


class InOrder:
    """For a Trainer: takes the rows in their order, and keeps the loss of each step."""

    losses: list[float]

    def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> BatchSampler:
        return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        found = super().compute_loss(*arguments, **named)  # type: ignore[misc]
        self.losses = [*getattr(self, "losses", []), float(found[0] if isinstance(found, tuple) else found)]
        return found
