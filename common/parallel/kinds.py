"""All kinds of parallelism, and what a layout combines of them."""

import os
from dataclasses import replace

from ..config import RunConfig
from ..environment import device_type, rank, world_size
from ..layout import Layout
from ..plan import Plan
from ..step.batch_loss import BatchLossFn
from ..step.checks import check_model, check_optimizer
from ..step.engine import Engine
from ..step.setup import Setup
from ..weights.parts import local
from .ddp import DDP
from .deepspeed import DEEPSPEED
from .expert import EXPERT
from .fsdp2 import FSDP2
from .kind import Kind, ModelCheck
from .pipeline import PIPELINE
from .sequence import SEQUENCE
from .tensor import TENSOR

# One line each, in the order in which they are asked: the first one that wraps a model wraps it.
KINDS: tuple[Kind, ...] = (
    PIPELINE,
    DEEPSPEED,
    TENSOR,
    FSDP2,
    SEQUENCE,
    EXPERT,
    DDP,
)


def layout_of(config: RunConfig) -> Layout:
    """What the launcher's environment variables and the flags ask for. Starts no process."""
    asked = [kind for kind in KINDS if kind.is_asked(config)]
    asked += [] if any(kind.wraps for kind in asked) else [DDP]
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "no":
        precision = next((own for kind in asked if (own := kind.precision())), "float32")
    layout = Layout(
        kinds=tuple(kind.name for kind in asked),
        num_processes=world_size(),
        rank=rank(),
        precision=precision,
        device=device_type(),
        needs_all_weights=world_size() > 1 and any(kind.needs_all_weights for kind in asked),
    )
    for kind in asked:
        layout = replace(layout, **kind.sizes(config))
    wrapper = wrapper_of(layout)
    titles = [kind.title(layout) for kind in (wrapper, *(kind for kind in asked if not kind.wraps))]
    return replace(layout, title=" × ".join(filter(None, titles)))


def kinds_of(layout: Layout) -> list[Kind]:
    """The kinds that a layout combines."""
    return [kind for kind in KINDS if kind.name in layout.kinds]


def wrapper_of(layout: Layout) -> Kind:
    """The kind that wraps the model."""
    return next(kind for kind in kinds_of(layout) if kind.wraps)


def model_checks(layout: Layout) -> list[ModelCheck]:
    """What a run refuses of a model or an optimizer: it raises the first refusal, `accelerate-recipes doctor` asks for
    all of them."""
    return [check_optimizer, check_model, *(check for kind in kinds_of(layout) for check in kind.model_checks)]


def check_trainable(setup: Setup) -> None:
    """Raises UsageError for a model, an optimizer or a loss that the run's layout cannot train, or would train with
    another result than one process."""
    check_batch_loss(setup.batch_loss, setup.plan)
    for check in model_checks(setup.plan.layout):
        check(setup.model, setup.optimizer, setup.plan)


def check_batch_loss(batch_loss: BatchLossFn | None, plan: Plan) -> None:
    """A loss that compares samples, which needs two passes per step."""
    if batch_loss is not None:
        wrapper_of(plan.layout).refuse_batch_loss()


def prepare(setup: Setup) -> Engine:
    """Wraps model and optimizer for the run's layout. `check_trainable` has accepted them."""
    on_disk = {name: weight.nbytes for name, weight in setup.model.named_parameters() if weight.is_meta}
    wrapper = wrapper_of(setup.plan.layout)
    for kind in kinds_of(setup.plan.layout):
        if kind is not wrapper:
            kind.divide(setup)
    engine = wrapper.wrap(setup)
    own = sum(local(weight).nbytes for name, weight in engine.module.named_parameters() if name in on_disk)
    whole = sum(on_disk.values())
    if own < whole and wrapper.reads_own_parts:
        setup.accelerator.print(f"{whole / 1e9:.2g} GB of weights, of which process 0 reads {own / 1e9:.2g} GB")
    return engine
