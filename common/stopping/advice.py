"""Errors of torch that a flag avoids."""

import torch

from common.plan import Plan


def advice_for(error: BaseException, plan: Plan) -> str | None:
    """The line to show instead of the error's traceback; None if there is nothing to advise."""
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        sharded = "a config that shards the model, for example accelerate_configs/fsdp2.yaml"
        size, own_samples = plan.micro_batch_size, plan.micro_batch_size * plan.accumulation
        smaller = max((value for value in range(1, size) if own_samples % value == 0), default=None)
        choices = sharded if smaller is None else f"--micro_batch_size {smaller}, or {sharded}"
        return f"out of memory with {size} samples per forward pass: type {choices}"
    if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
        return f"--deterministic: {str(error).partition(' does not')[0]} has no deterministic kernel: remove that flag"
    return None
