"""The recipe of tests/users under a derived plan of tensor parallelism that is made wrong.

wrong_plan.py --model gpt2 --mistake number
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).parents[1] / "users"))
import recipe

from accelerate_recipes import flag, run
from accelerate_recipes.common.parallel import tensor

Plan = dict[str, str]


def without(style: str) -> Callable[[Plan], Plan]:
    return lambda plan: {name: other for name, other in plan.items() if other != style}


def with_style(style: str, *ends: str) -> Callable[[Plan], Plan]:
    return lambda plan: plan | {name: style for name in plan if name.endswith(ends)}


MISTAKES: dict[str, Callable[[Plan], Plan]] = {
    "none": lambda plan: plan,
    "number": without("number"),  # each process has all heads
    "packs": with_style("colwise", "c_attn"),  # the first process has the queries and half of the keys
    "other_packs": with_style("packed_colwise_2", "c_attn"),
    "row": without("rowwise"),
    "column": lambda plan: {name: style for name, style in plan.items() if not name.endswith("v_proj")},
    "norm": without("replicated_with_grad_allreduce"),  # each process has the gradient of its own heads
    "residual": lambda plan: plan | {"transformer.wpe": "colwise"},
    "gathered": with_style("colwise_gather_output", "c_fc"),
    "more_heads": lambda plan: plan | {"transformer.h.0.attn.head_dim": "number"},
}


@dataclass(kw_only=True)
class Config(recipe.Config):
    mistake: Literal[*MISTAKES] = flag("none", "what is wrong in the plan")


def main(config: Config) -> None:
    right = tensor.derive

    def wrong(*arguments: Any) -> Plan:
        plan = right(*arguments)
        changed = MISTAKES[config.mistake](plan)
        assert (changed == plan) == (config.mistake == "none")
        return changed

    def without_plan() -> Any:
        model: Any = build()
        model.tp_plan = {}
        return model

    tensor.derive = wrong
    build, step = recipe.MODELS[config.model]
    recipe.MODELS[config.model] = without_plan, step
    recipe.main(config)


if __name__ == "__main__":
    run(main, Config)
