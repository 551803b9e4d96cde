"""The base class for optimizer steps and for the state that a checkpoint saves."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ..data.batches import Batch
from ..errors import UsageError
from ..seeds import UPDATE, seed_forward
from .batch_loss import Share, first_pass, gathered
from .ema import EMA
from .optimizer_state import Numbers, as_tensor
from .parts import Part, TensorReader, is_divided, kept_tensors, parts_of, placed_like
from .setup import Setup


@dataclass
class StepResult:
    """The result of one optimizer step in this process. Tensors stay on the device: reading them would stall it.

    Attributes:
        losses: for each micro-batch, the sum of weight × loss over this process's samples, 0-dim.
        weight: sum of the weights of this process's samples; the number of samples if a batch has
            no "weight".
        grad_norm: L2 norm of the gradient of the whole model over the global batch, before
            clipping; None if not requested.
        skipped: whether the loss scaler found an overflow and left the weights unchanged.
        metrics: for each micro-batch, the other metrics of `forward_step`, each times the sample's weight, of shape
            (micro_batch,). A pipeline has none.
    """

    losses: list[Tensor]
    weight: Tensor | float
    grad_norm: Tensor | float | None
    skipped: bool = False
    metrics: list[dict[str, Tensor]] = field(default_factory=list)


class Engine(ABC):
    """Takes optimizer steps with the model and optimizer that a kind of parallelism has wrapped.

    Attributes:
        model: the model that `forward_step` calls.
        ema: the moving average of the weights; None without `--ema_decay`.
        shares: of this process's micro-batches in the loss of the global batch; of the last step with a first pass.
        numbers: what the optimizer keeps beside tensors.
        rounds_weights: whether the first step finds other weights than the model had, because they were rounded.
    """

    rounds_weights = False

    def __init__(self, setup: Setup, model: nn.Module, optimizer: AcceleratedOptimizer):
        self.accelerator, self.model, self.optimizer, self.plan = setup.accelerator, model, optimizer, setup.plan
        forward_step, self.batch_loss = setup.checked_functions()
        self.forward_step = forward_step if setup.watched is None else setup.watched(forward_step)
        self.shares: list[Share] = []
        self.numbers = Numbers(self._own_optimizer)
        model.train()  # a pretrained model arrives in evaluation mode
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        decay = self.plan.config.ema_decay
        self.ema = EMA(self._updated_tensors(), decay, self._after_swap) if decay else None
        mean_scale = self.plan.layout.data_parallel_size / self.plan.config.batch_size
        self._mean_scale = torch.tensor(mean_scale, device=self.accelerator.device)  # made once: a copy stalls a GPU

    @abstractmethod
    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """Takes optimizer step `number`, counted from 0, on this process's part of the global batch.

        The step uses the gradient of the mean loss over the global batch, weighted by "weight" if the
        batch has one. The number of processes and micro-batches does not change it. A step whose gradient norm is
        known and not finite leaves the weights as they were.
        """

    def _loss_scale(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor | float]:
        """(factor, weight). The mean over data-parallel ranks of factor × (a rank's summed losses) is the mean loss of
        the global batch; weight is the total weight of this process's samples."""
        plan = self.plan
        if "weight" not in micro_batches[0]:
            return self._mean_scale, plan.config.batch_size / plan.layout.data_parallel_size
        weight = torch.stack([batch["weight"].sum() for batch in micro_batches]).sum()
        # Processes with the same samples count equally often in num_processes and in the sum.
        total = self.accelerator.reduce(weight, "sum")
        # A total of 0 has losses of 0; divided by it, they would not be numbers.
        return self.accelerator.num_processes / total.where(total > 0, 1), weight

    def _first_pass(self, number: int, micro_batches: Sequence[Batch]) -> None:
        """With a `batch_loss`, finds the shares of these micro-batches in the loss of the global batch. One micro-batch
        of one process is the whole batch: one pass is enough."""
        if self.batch_loss is None or self.plan.layout.num_processes * self.plan.accumulation == 1:
            return

        def forward(index: int, batch: Batch) -> dict[str, Tensor]:
            self._seed(number, index)
            return self.forward_step(self.model, batch)

        values = first_pass(forward, micro_batches, len(micro_batches), self.module)
        whole = {name: gathered(self.accelerator, self.plan.layout, rows) for name, rows in values.items()}
        shares = self.batch_loss.shares(whole, number)
        self.shares = [shares[self.plan.row(index)] for index in range(self.plan.accumulation)]

    def _forward(self, number: int, index: int, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of weight × loss, 0-dim, and the other metrics of this process's micro-batch `index` in a step."""
        self._seed(number, index)
        values = metrics = self.forward_step(self.model, batch)
        if self.shares:
            metrics = self.shares[index].metrics
        elif self.batch_loss is not None:
            metrics = self.batch_loss(values, number)
        loss = weighted_sum(metrics["loss"], batch)
        if self.shares:
            loss = loss + self.shares[index].connection(values)
        return loss, weighted_metrics(metrics, batch)

    def _seed(self, number: int, index: int) -> None:
        """Seeds dropout for the forward pass of this process's micro-batch `index` in step `number`."""
        seed_forward(self.plan.config.seed, number, self.plan.row(index), self.accelerator.device)

    def _update(self, number: int, grad_norm: Tensor | float | None) -> bool:
        """Lets the optimizer change the weights, unless the norm is not finite, and drops the gradients. Returns
        whether a loss scaler skipped the step."""
        seed_forward(self.plan.config.seed, number, UPDATE, self.accelerator.device)  # for an optimizer that draws
        if self.accelerator.scaler is not None:
            self.optimizer.step()
        else:  # Accelerate's wrapper only adds time to a step
            _step_if_finite(self._own_optimizer, grad_norm)
        for parameter in self._updated_tensors():  # as zero_grad, in a fifth of the time
            parameter.grad = None
        skipped = self.accelerator.scaler is not None and self.optimizer.step_was_skipped
        if self.ema is not None and not skipped:
            self.ema.update()
        return skipped

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the recipe made, without wrappers."""
        return self.optimizer.optimizer

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The recipe's own module, without the wrappers of the parallelism."""

    def _updated_tensors(self) -> list[Tensor]:
        """The weights, or shards of weights, that this process's optimizer updates."""
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _after_swap(self) -> None:
        """After an evaluation FSDP2 keeps the gathered weights of the outermost module for a backward pass."""
        for module in self.model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()

    def set_learning_rate(self, factor: float) -> float:
        """Sets the learning rate of each parameter group to its peak × factor; returns the first group's rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def ema_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the moving averages as its weights; a no-op without `--ema_decay`."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds as JSON, beside the tensors."""
        averaged, numbers = 0 if self.ema is None else self.ema.num_updates, self.numbers.state_dict()
        return {"num_averaged": averaged, "loss_scale": self._loss_scale_state(), "optimizer": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`; the loss scale only if both runs have one."""
        if self.ema is not None:
            self.ema.num_updates = state["num_averaged"]
        self._load_loss_scale(state["loss_scale"])
        self.numbers.load_state_dict(state["optimizer"])

    def saved_tensors(self) -> dict[str, Tensor]:
        """{name: parameter or buffer} of the module, with the same parameter objects as the optimizer."""
        # Not named_parameters: after an evaluation FSDP2 returns gathered weights there and frees their memory when
        # it shards again. state_dict shards again first.
        return kept_tensors(self.module)

    def parts(self) -> list[Part]:
        """This process's parts of `model.<name>`, `optimizer.<name>.<slot>` and, with `--ema_decay`,
        `average.<name>`."""
        averages = {} if self.ema is None else self.ema.averages
        parts: list[Part] = []
        for name, tensor in self.saved_tensors().items():
            holders = self._holders(name)
            # Buffers may differ between processes: DDP uses those of the first.
            parts += parts_of(f"model.{name}", tensor, holders, of_first=not isinstance(tensor, nn.Parameter))
            for slot, value in self.optimizer.optimizer.state.get(tensor, {}).items():
                if value is not None and not isinstance(value, Tensor):
                    value = as_tensor(type(self._own_optimizer).__name__, slot, value)
                if value is not None:
                    parts += parts_of(f"optimizer.{name}.{slot}", value, holders)
            if tensor in averages:
                parts += parts_of(f"average.{name}", averages[tensor], holders)
        return parts

    def _holders(self, name: str) -> range:
        """Ranks of the processes that hold a saved tensor, or shards of it."""
        return range(self.plan.layout.num_processes)

    def load_parts(self, reader: TensorReader) -> None:
        """Restores the optimizer state and the moving averages. The weights were loaded before `prepare`."""
        load_optimizer(self.optimizer.optimizer, self.saved_tensors(), reader)
        for name, weight in self.saved_tensors().items():
            if self.ema is not None and f"average.{name}" in reader.tensors:
                self.ema.averages[weight] = placed_like(weight, reader, f"average.{name}")

    def each_full_weight(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, parameter or saved buffer), whole in the main process, one at a time.

        A collective: all processes must call it and take all.
        """
        for name, tensor in self._tensors_to_export():
            yield name, self._whole(tensor).detach()

    def _tensors_to_export(self) -> Iterable[tuple[str, Tensor]]:
        return self.saved_tensors().items()

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if is_divided(tensor) else tensor

    def _loss_scale_state(self) -> dict[str, float]:
        """State of the fp16 loss scaler; empty in other precisions."""
        scaler = self.accelerator.scaler
        return {} if scaler is None else scaler.state_dict()

    def _load_loss_scale(self, state: dict[str, float]) -> None:
        if self.accelerator.scaler is not None and "growth_factor" in state:
            self.accelerator.scaler.load_state_dict(state)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode for the `with` block."""
    _set_training(model, False)
    try:
        yield
    finally:
        _set_training(model, True)


def _set_training(model: nn.Module, training: bool) -> None:
    model.train(training)
    model.training = training  # a wrapper may forward train() without setting its own flag


def _step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor | float | None) -> None:
    """Takes a step of an optimizer, unless the norm of the gradient is known and not finite.

    To read the norm would stall a GPU. There fused kernels look at it, as torch's loss scaler lets them; another
    optimizer takes the step, and the run ends a step later.
    """
    is_read = not isinstance(grad_norm, Tensor) or grad_norm.device.type == "cpu"
    if grad_norm is None or (is_read and math.isfinite(grad_norm)):
        optimizer.step()
    elif not is_read:
        looks: Any = optimizer if optimizer.defaults.get("fused") else None
        if looks is not None:
            looks.grad_scale, looks.found_inf = None, 1 - torch.as_tensor(grad_norm).isfinite().float()
        optimizer.step()
        if looks is not None:
            del looks.grad_scale, looks.found_inf


def weighted_sum(loss: Tensor, batch: Batch) -> Tensor:
    """Sum of a micro-batch's losses, each times its weight if the batch has weights."""
    return (loss * batch["weight"]).sum() if "weight" in batch else loss.sum()


def weighted_metrics(values: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """What `forward_step` returned beside the loss, without integers such as class ids, times the weights of the batch.
    Sums wait until a record needs them."""
    metrics = {name: value.detach() for name, value in values.items() if name != "loss" and is_metric(value)}
    return {name: value * batch["weight"] for name, value in metrics.items()} if "weight" in batch else metrics


def is_metric(value: Tensor) -> bool:
    """Whether a value of `forward_step` is a number to take means of, and not a class id or a mask."""
    return value.is_floating_point() or (value.dtype == torch.bool and value.ndim == 1)


def load_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], reader: TensorReader) -> None:
    """Restores the tensors of an optimizer's state; each is placed as its weight is."""
    slots, on_device = optimizer_slots(reader), counts_on_device(optimizer)
    for name, weight in weights.items():
        for slot in slots.get(name, []):
            key = f"optimizer.{name}.{slot}"
            shape = list(reader.tensors[key]["shape"])
            if optimizer.defaults.get("fused") and shape not in ([], list(weight.shape)):  # its kernel does not look
                raise UsageError(f"{key} of the checkpoint has the shape {shape}, the weight {list(weight.shape)}")
            kept = reader.tensor(key) if slot == "step" and not on_device else placed_like(weight, reader, key)
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
