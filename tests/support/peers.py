"""What the example scripts of transformers compute, with its models, collators and losses, and torch's optimizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NUM_STEPS, BATCH_SIZE, RATE = 10, 16, 3e-3
# Of a recipe that takes the same steps. The scripts do not clip.
FLAGS = f"--max_steps {NUM_STEPS} --batch_size {BATCH_SIZE} --learning_rate {RATE} --lr_schedule constant "
FLAGS += "--warmup_steps 0 --weight_decay 0 --max_grad_norm 0 --log_every 1"
CLOSE = 1e-5


def write_parts(folder: Path, rows: Callable[[int, int], list[Any]], evaluation: str = "test") -> Path:
    """Writes 200 rows to train on and 51 to evaluate, of `rows(number, seed)`. Returns the folder."""
    for seed, (part, number) in enumerate({"train": 200, evaluation: 51}.items()):
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows(number, seed))))
    return folder


def losses(model: Any, samples: list[Any], collate: Callable[[list[Any]], Any]) -> list[float]:
    """The losses of the first steps on batches in the order of our runs with seed 0. Trains the model.

    Args:
        model: of transformers, whose output has a loss.
        samples: all of the training set, at least as many as the steps take.
        collate: makes a batch of samples, with "labels".
    """
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[: NUM_STEPS * BATCH_SIZE]
    assert len(order) == NUM_STEPS * BATCH_SIZE
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0)
    found = []
    for ids in order.view(NUM_STEPS, BATCH_SIZE).tolist():
        loss = model(**collate([samples[index] for index in ids])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
