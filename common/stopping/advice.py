"""Errors of torch that a flag can prevent."""

import re

from ..accidents import advice
from ..errors import is_out_of_memory
from ..plan import Plan, next_smaller_divisor


def advice_for(error: BaseException, plan: Plan) -> str | None:
    """The line to show instead of the error's traceback; None if there is nothing to advise."""
    text = str(error)
    if is_out_of_memory(error):
        amount = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        size = plan.micro_batch_size
        smaller = next_smaller_divisor(size * plan.accumulation, size)
        example = ", for example with accelerate_configs/fsdp2.yaml" if plan.layout.dp_shard == 1 else ""
        sharded = f"shard the model over more GPUs{example}"
        choices = sharded if smaller is None else f"use --micro_batch_size {smaller}, or {sharded}"
        what = f"{size} sample{'s' * (size > 1)} per forward pass"
        return f"out of memory with {what}{f', {amount[1]} more' if amount else ''}: {choices}"
    if plan.config.deterministic and "does not have a deterministic implementation" in text:
        return f"--deterministic: {text.partition(' does not')[0]} has no deterministic kernel: remove that flag"
    return advice(error)
