"""The state of model and optimizer: what checkpoints save, and what exports gather."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..plan import Plan
from ..weights.shards import Shard, TensorReader, checkpoint_tensors, read_like, shards_of, whole
from .ema import EMA
from .movement import Movement
from .optimizer_state import Numbers, as_tensor
from .reached import Reached
from .replicas import Replicas


class EngineState:
    """The weights, the optimizer's state and the moving averages of an engine.

    Attributes:
        accelerator: from `start(config)`.
        model: as the engine's strategy wrapped it.
        optimizer: as Accelerate wrapped it, or the recipe's own.
        plan: of the run.
        ema: the moving average of the weights; None without `--ema_decay`.
        numbers: what the optimizer keeps beside tensors.
        reached: finds weights that no gradient reaches; None: nobody asks.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: AcceleratedOptimizer | torch.optim.Optimizer
    plan: Plan
    ema: EMA | None
    numbers: Numbers
    reached: Reached | None = None

    @property
    def module(self) -> nn.Module:
        """The recipe's own module, without the wrappers of the parallelism."""
        # Not accelerator.unwrap_model: it imports deepspeed if installed, which takes seconds.
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def running_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """(name in the recipe's module, module) of what this process runs."""
        return self.module.named_modules()

    @cached_property
    def replicas(self) -> Replicas:
        """The comparison of what several processes hold of the same weights."""
        return Replicas(self)

    @cached_property
    def movement(self) -> Movement:
        """Whether the steps move the weights."""
        return Movement(self)

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the recipe made, without wrappers."""
        wrapped = self.optimizer
        return wrapped.optimizer if isinstance(wrapped, AcceleratedOptimizer) else wrapped

    def _updated_tensors(self) -> list[Tensor]:
        """The weights, or shards of weights, that this process's optimizer updates."""
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _after_swap(self) -> None:
        """After an evaluation FSDP2 keeps the gathered weights of the outermost module for a backward pass."""
        for module in self.model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()

    def ema_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the moving averages as its weights; a no-op without `--ema_decay`."""
        return nullcontext() if self.ema is None else self.ema.swap_in()

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds as JSON, beside the tensors."""
        averaged, scaler = 0 if self.ema is None else self.ema.num_updates, self.accelerator.scaler
        loss_scale = {} if scaler is None else scaler.state_dict()
        return {"num_averaged": averaged, "loss_scale": loss_scale, "optimizer": self.numbers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`; the loss scale only if both runs have one."""
        if self.ema is not None:
            self.ema.num_updates = state["num_averaged"]
        if self.accelerator.scaler is not None and "growth_factor" in state["loss_scale"]:
            self.accelerator.scaler.load_state_dict(state["loss_scale"])
        self.numbers.load_state_dict(state["optimizer"])

    def saved_tensors(self) -> dict[str, Tensor]:
        """{name: parameter or buffer} of the module, with the same parameter objects as the optimizer."""
        # Not named_parameters: after an evaluation FSDP2 returns gathered weights there and frees their memory when
        # it shards again. state_dict shards again first.
        return checkpoint_tensors(self.module)

    def shards(self) -> list[Shard]:
        """This process's shards of `model.<name>`, `optimizer.<name>.<slot>` and, with `--ema_decay`,
        `average.<name>`."""
        averages = {} if self.ema is None else self.ema.averages
        shards: list[Shard] = []
        for name, tensor in self.saved_tensors().items():
            holders = self.holders(name)
            # Buffers may differ between processes: DDP uses those of the first.
            shards += shards_of(f"model.{name}", tensor, holders, of_first=not isinstance(tensor, nn.Parameter))
            for slot, value in self._own_optimizer.state.get(tensor, {}).items():
                if value is not None and not isinstance(value, Tensor):
                    value = as_tensor(type(self._own_optimizer).__name__, slot, value)
                if value is not None:
                    shards += shards_of(f"optimizer.{name}.{slot}", value, holders)
            if tensor in averages:
                shards += shards_of(f"average.{name}", averages[tensor], holders)
        return shards

    def holders(self, name: str) -> Sequence[int]:
        """Ranks of the processes that hold a saved tensor, or shards of it."""
        return range(self.plan.layout.num_processes)

    def load_parts(self, reader: TensorReader) -> None:
        """Restores the optimizer state and the moving averages. The weights were loaded before `prepare`."""
        load_optimizer(self._own_optimizer, self.saved_tensors(), reader)
        for name, weight in self.saved_tensors().items():
            if self.ema is not None and f"average.{name}" in reader.tensors:
                self.ema.averages[weight] = read_like(weight, reader, f"average.{name}")

    def each_full_weight(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, parameter or saved buffer), whole in the main process, one at a time.

        A collective: all processes must call it and take all.
        """
        yield from self.each_whole(self.saved_tensors())

    def each_whole(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The same for these tensors, which are divided as the weights of these names are."""
        for name, tensor in self._of_all_stages(tensors):
            yield name, self._whole(tensor).detach()

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return tensors.items()

    def _whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)


def load_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], reader: TensorReader) -> None:
    """Restores the tensors of an optimizer's state; each is placed as its weight is."""
    slots, on_device = optimizer_slots(reader), counts_on_device(optimizer)
    for name, weight in weights.items():
        for slot in slots.get(name, []):
            key = f"optimizer.{name}.{slot}"
            shape = list(reader.tensors[key]["shape"])
            if optimizer.defaults.get("fused") and shape not in ([], list(weight.shape)):  # its kernel does not look
                raise UsageError(f"{key} of the checkpoint has the shape {shape}, the weight {list(weight.shape)}")
            kept = reader.tensor(key) if slot == "step" and not on_device else read_like(weight, reader, key)
            optimizer.state[weight][slot] = kept


def optimizer_slots(reader: TensorReader) -> dict[str, list[str]]:
    """{weight name: slots of its optimizer state} in a checkpoint."""
    slots: dict[str, list[str]] = {}
    for key in reader.tensors:
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, slot = rest.rpartition(".")
            slots.setdefault(name, []).append(slot)
    return slots


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps its step count on the device, as torch's fused and capturable ones do."""
    return any(optimizer.defaults.get(kind) for kind in ("fused", "capturable"))
