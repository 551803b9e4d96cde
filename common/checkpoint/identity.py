"""What a run must share with a checkpoint to go on from it: its identity, and which processes see the same samples."""

from dataclasses import asdict
from typing import Any

import torch

from common.cpu_group import CpuGroup
from common.plan import Plan


def layout(plan: Plan, group: CpuGroup) -> dict[str, int]:
    """Which processes see the same samples: where it is the same, each goes on with its own random state.

    Returns:
        The number of processes, of shares of the samples among them, and of pipeline stages.
    """
    return {"processes": group.size, "shares": plan.data_parallel_size, "stages": plan.config.pipeline_stages}


def num_replicas(layout: dict[str, int]) -> int:
    """How many processes count the same loss: those of a tensor-parallel group."""
    return layout["processes"] // (layout["shares"] * layout["stages"])


def described(layout: dict[str, int]) -> str:
    processes, shares = layout["processes"], layout["shares"]
    groups = f" in {shares} group{'s' * (shares > 1)}" if shares < processes else ""
    return f"{processes} process{'es' * (processes > 1)}{groups}"


def identity(plan: Plan, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What must be the same for a run to go on as itself."""
    config = asdict(plan.config)
    return {name: config[name] for name in ("seed", "batch_size", "data", "ema_decay")} | {
        "num_samples": plan.num_samples,
        "optimizer": type(optimizer).__name__,
    }
