"""One process, or DDP: each process holds the whole model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..layout import Layout
from ..step.engine import Engine
from ..step.guards import not_used
from ..step.setup import Setup, compile_if_asked
from .strategy import Division, Strategy


class Ddp(Strategy):
    """The default: one process or DDP, if no other strategy applies."""

    name = "DDP"
    needs_all_weights = True  # DDP waits for the gradient of each weight
    takes_means = True  # as torch's DDP does; a hook that sums takes 60 µs more per step
    fallback = "--config_file accelerate_configs/single.yaml"
    cause_in_update = "{optimizer} changes weights differently in each process: use only gradients"

    def title(self, layout: Layout) -> str:
        if layout.sp > 1:
            return f"DDP {layout.data_parallel_size}" if layout.data_parallel_size > 1 else ""
        return self.name if layout.num_processes > 1 else "no parallelism"

    def wrap(self, setup: Setup, division: Division) -> Engine:
        division.apply(setup.model)
        compile_if_asked(setup.model, setup.plan)
        _let_ddp_send_state_alone(setup.model)
        engine = Engine(setup, setup.accelerator.prepare_model(setup.model))
        if isinstance(engine.model, DistributedDataParallel):
            engine.model.__class__ = type("DistributedDataParallel", (_Transparent, type(engine.model)), {})
            if not engine.model.find_unused_parameters:
                engine.after_backward.append(_refuses_missing_gradients(setup.model))
        return engine


class _Transparent(nn.Module):
    """Has the attributes of the recipe's module, such as a layer, as FSDP2's and DeepSpeed's model have."""

    def __getattr__(self, name: str) -> Any:
        module = super().__getattr__("module")
        return module if name == "module" else getattr(module, name)


def _refuses_missing_gradients(model: nn.Module) -> Callable[[], None]:
    """A function that ends the run after a backward pass without the gradient of a weight that had one in the first
    step. DDP waits for it, and leaves the other gradients unsummed in each process."""
    waited: dict[str, Tensor] = {}

    def check() -> None:
        if not waited:
            waited.update((name, weight) for name, weight in model.named_parameters() if weight.grad is not None)
        for name, weight in waited.items():
            if weight.grad is None:
                raise not_used(f"this step does not use {name}, unlike earlier steps, and DDP waits for its gradient")

    return check


def _let_ddp_send_state_alone(model: nn.Module) -> None:
    """DDP sends the first process's buffers before each forward pass, for example BatchNorm's. A buffer that no
    checkpoint holds is not state, but a constant, for example a table of positions: each process has computed it."""
    modules = model.named_modules()
    constants = [f"{path}.{name}".lstrip(".") for path, each in modules for name in each._non_persistent_buffers_set]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
