"""A recipe for what users bring. The flags choose one model, optimizer, habit or mistake.

recipe.py --model NAME --optimizer NAME --step NAME --set NAME --sampler NAME --collate_fn NAME
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import families
import habits
import kinds
import optimizers
import samples
import steps
from nets import NETS, ZOO

from accelerate_recipes import RunConfig, fit, flag, run, start

MODELS = families.ZOO | families.FAMILIES | {name: (build, steps.vector_step) for name, build in NETS.items()}
MODELS |= {
    name: (build, steps.causal_step if name.startswith("causal") else steps.vector_step)
    for name, build in (habits.HABITS | kinds.STRATEGIES).items()
}
OPTIMIZERS = optimizers.ZOO | optimizers.HABITS | optimizers.OTHERS
STEPS, SETS = steps.HABITS | steps.MISTAKES, samples.SETS | samples.MISTAKEN_SETS
SUMMARIES = {
    "verdict": lambda means: means | {"verdict": "good"},
    "of_own_samples": lambda means: means | {"right": steps.RIGHT[0]},
}

ZOO_MODELS, ZOO_OPTIMIZERS = [*families.ZOO, *ZOO], [*optimizers.ZOO]
HABITS = [
    *(f"step {name}" for name in steps.HABITS if not name.startswith("causal")),
    *(f"model tied --step {name}" for name in steps.HABITS if name.startswith("causal")),
    *(f"model {name}" for name in habits.HABITS),
    *(f"model {name} --optimizer plain_sgd" for name in kinds.STRATEGIES),
    *("model sparse_tables --optimizer sparse_adam", "model sparse_table --optimizer Adagrad"),
    *(f"set {name}" for name in samples.SETS),
    *(f"sampler {name}" for name in samples.SAMPLERS),
    *(f"collate_fn {name}" for name in samples.COLLATE_FNS),
    *(f"optimizer {name}" for name in optimizers.HABITS | optimizers.OF_MODEL),
]


@dataclass(kw_only=True)
class Config(RunConfig):
    model: Literal[*MODELS] = flag("net", "which model")
    optimizer: Literal[*OPTIMIZERS, *optimizers.OF_MODEL] = flag("adamw", "which optimizer")
    step: Literal["", *STEPS] = flag("", "which forward_step, instead of the model's")
    set: Literal["", *SETS] = flag("", "which data set")
    sampler: Literal["", *samples.SAMPLERS] = flag("", "which sampler")
    collate_fn: Literal["", *samples.COLLATE_FNS] = flag("", "which collate_fn")
    summary: Literal["", *SUMMARIES] = flag("", "which summarize")
    learning_rate: float = flag(1.0, "how many times the optimizer's own rate")
    batch_size: int = 8
    micro_batch_size: int | None = 2  # the masks of dropout depend on it
    max_steps: int | None = 5
    log_every: int = 1
    eval_every: int | None = 3


def main(config: Config) -> None:
    accelerator = start(config)
    build, own_step = MODELS[config.model]
    model, step = build(), STEPS.get(config.step, own_step)
    if config.optimizer in optimizers.OF_MODEL:
        optimizer = optimizers.OF_MODEL[config.optimizer](model)
    else:
        optimizer = OPTIMIZERS[config.optimizer]([weight for weight in model.parameters() if weight.requires_grad])
    if config.learning_rate != 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * config.learning_rate
    default: Any = samples.Media if config.model in families.FAMILIES else samples.Samples
    make = SETS.get(config.set, default)
    fit(
        accelerator,
        model,
        optimizer,
        partial(step, whole=model),
        make(32, 1),
        make(11, 2) if config.set in samples.MISTAKEN_SETS else default(11, 2),
        config,
        summarize=SUMMARIES.get(config.summary, dict),
        collate_fn=samples.COLLATE_FNS.get(config.collate_fn),
        sampler=samples.SAMPLERS.get(config.sampler),
    )


if __name__ == "__main__":
    run(main, Config)
