"""Promise: what a plain loop of torch trains in one process trains here with the same result."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate

from accelerate_recipes import RunConfig
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.plan import Plan
from support.launching import fork
from support.recipes import USERS
from support.runs import ROOT, TOLERANCE

BROUGHT = runpy.run_path(str(ROOT / USERS))
STRATEGIES = [*BROUGHT["kinds"].STRATEGIES, "complex_weight", "mixed_types", "spectral_norm", "old_spectral_norm"]
CELLS = [(kind, "plain_sgd") for kind in [*STRATEGIES, "bf16_weights"]]
CELLS += [
    ("sparse_tables", "sparse_adam"),
    ("sparse_table", "Adagrad"),
    ("sparse_tables", "Adagrad"),
    ("lazy", "adamw"),
]


def plain_losses(kind: str, optimizer_name: str) -> list[float]:
    """The losses of four steps of a loop without our code; the plan says which samples."""
    torch.manual_seed(0)
    build, forward_step = BROUGHT["MODELS"][kind]
    model, dataset = build(), BROUGHT["samples"].Samples(32, 1)
    optimizer = BROUGHT["OPTIMIZERS"][optimizer_name](list(model.parameters()))
    plan = Plan.of(RunConfig(epochs=1, batch_size=8, learning_rate=1.0, max_steps=4), Layout(), 32)
    losses = []
    for _, ids in plan.micro_batches():
        batch = default_collate([dataset[index] for index in ids.tolist()])
        loss = forward_step(model, batch, model)["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        if "sparse" not in kind and kind != "half":  # plain clipping takes none, or rounds
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    return losses


DRAWN = ("lazy", "sparse_table", "scripted_whole", "old_weight_norm", "half")  # in `make test`


@pytest.mark.parametrize(
    ("kind", "optimizer"), [pytest.param(*cell, marks=[] if cell[0] in DRAWN else pytest.mark.full) for cell in CELLS]
)
def test_losses_of_a_plain_loop(tmp_path: Path, kind: str, optimizer: str) -> None:
    flags = "--max_steps 4 --micro_batch_size 8 --lr_schedule constant --warmup_steps 0 --max_grad_norm"
    flags += " 0" if "sparse" in kind or kind == "half" else " 1"
    run = fork(tmp_path / "run", "single", USERS, f"--model {kind} --optimizer {optimizer} {flags}")
    assert run.column("train/loss") == pytest.approx(plain_losses(kind, optimizer), rel=TOLERANCE)
