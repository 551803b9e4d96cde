"""The transformer with all-reduces that add in an order of their own in each group, as NCCL may do. Each process writes
the weights that it has of the tied embedding."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
transformer = importlib.import_module("transformer")
from accelerate_recipes import fit, run  # noqa: E402


class Done:
    def wait(self) -> None: ...


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done | None:
    if op != dist.ReduceOp.SUM:
        return real(tensor, op, group, async_op)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    first = min(dist.get_process_group_ranks(group or dist.group.WORLD)) % len(parts)
    total = parts[first]
    for part in [*parts[first + 1 :], *parts[:first]]:
        total = total + part
    tensor.copy_(total)
    return Done() if async_op else None


def fit_and_write(accelerator: Any, model: Any, *others: Any, **keywords: Any) -> None:
    fit(accelerator, model, *others, **keywords)
    folder = others[4].output_dir
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        if hasattr(end, "weight"):
            torch.save(end.weight.detach(), folder / f"tied_{accelerator.process_index}.pt")


real, dist.all_reduce = dist.all_reduce, all_reduce
transformer.fit = fit_and_write

if __name__ == "__main__":
    run(transformer.main, transformer.Config)
