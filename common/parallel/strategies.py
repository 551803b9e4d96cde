"""All strategies, and what a layout combines of them."""

from dataclasses import replace

from ..config import RunConfig
from ..environment import Environment, device_type
from ..layout import Layout
from ..step.checks import check_model, check_optimizer
from ..step.engine import Engine
from ..step.setup import Setup
from ..weights.shards import local
from .ddp import DDP
from .deepspeed import DEEPSPEED
from .expert import EXPERT
from .fsdp2 import FSDP2
from .grid import Division
from .pipeline import PIPELINE
from .sequence import SEQUENCE
from .strategy import ModelCheck, Strategy
from .tensor import TENSOR

# One line each, in the order in which they are asked: the first one that wraps a model wraps it.
STRATEGIES: tuple[Strategy, ...] = (
    PIPELINE,
    DEEPSPEED,
    TENSOR,
    FSDP2,
    SEQUENCE,
    EXPERT,
    DDP,
)

# Those that divide a model, in the order in which they must: each divides what those before it have left.
ORDER: tuple[Strategy, ...] = (TENSOR, SEQUENCE, EXPERT, FSDP2)


def layout_of(environment: Environment, config: RunConfig) -> Layout:
    """What the launcher, the config file and the flags ask for. Starts no process."""
    asked = [strategy for strategy in STRATEGIES if strategy.is_requested(environment, config)]
    asked += [] if any(strategy.wraps for strategy in asked) else [DDP]
    precision = environment.mixed_precision
    if precision == "no":
        precision = next((own for strategy in asked if (own := strategy.precision(environment))), "float32")
    main = next(strategy for strategy in asked if strategy.wraps)
    layout = Layout(
        environment=environment,
        strategies=tuple(strategy.name for strategy in asked),
        num_processes=environment.world_size,
        rank=environment.rank,
        precision=precision,
        device=device_type(),
        needs_all_weights=environment.world_size > 1 and any(strategy.needs_all_weights for strategy in asked),
        takes_means=main.takes_means,
    )
    for strategy in asked:
        layout = replace(layout, **strategy.sizes(environment, config))
    outside_in = [strategy for strategy in asked[::-1] if strategy.wraps] + [each for each in asked if not each.wraps]
    return replace(layout, title=" × ".join(filter(None, [strategy.title(layout) for strategy in outside_in])))


def strategies_of(layout: Layout) -> list[Strategy]:
    """The strategies that a layout combines."""
    return [strategy for strategy in STRATEGIES if strategy.name in layout.strategies]


def main_strategy(layout: Layout) -> Strategy:
    """The strategy that wraps the model."""
    return next(strategy for strategy in strategies_of(layout) if strategy.wraps)


def model_checks(layout: Layout) -> list[ModelCheck]:
    """What a run refuses of a model or an optimizer: it raises the first refusal, `accelerate-recipes doctor` asks for
    all of them."""
    return [
        check_optimizer,
        check_model,
        *(check for strategy in strategies_of(layout) for check in strategy.model_checks),
    ]


def check_trainable(setup: Setup) -> Setup:
    """The setup, with what the strategies of the layout need to know of the model. Raises UsageError for a model or an
    optimizer that the run's layout cannot train, or would train with another result than one process."""
    for check in model_checks(setup.plan.layout):
        check(setup.model, setup.optimizer, setup.plan)
    return with_plans(setup)


def with_plans(setup: Setup) -> Setup:
    """The setup, with how the strategies of the layout will divide the model. Raises UsageError if they cannot."""
    return replace(setup, plans={strategy.name: strategy.plan(setup) for strategy in strategies_of(setup.plan.layout)})


def prepare(setup: Setup) -> Engine:
    """Wraps model and optimizer for the run's layout. `check_trainable` has accepted them."""
    on_disk = {name: weight.nbytes for name, weight in setup.model.named_parameters() if weight.is_meta}
    main, names = main_strategy(setup.plan.layout), setup.plan.layout.strategies
    engine = main.wrap(setup, Division(setup, [strategy for strategy in ORDER if strategy.name in names]))
    own = sum(
        local(weight).nbytes
        for name, module in engine.running_modules()
        for key, weight in module.named_parameters(prefix=name, recurse=False)
        if key in on_disk
    )
    whole = sum(on_disk.values())
    if own < whole and main.reads_own_parts:
        setup.accelerator.print(f"{whole / 1e9:.2g} GB of weights, of which process 0 reads {own / 1e9:.2g} GB")
    return engine
