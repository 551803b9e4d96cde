"""Takes optimizer steps: `Engine.step`, for all strategies but DeepSpeed."""

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ..data.sets import Batch
from ..errors import UsageError
from ..failure import line_of
from ..norms import clip
from ..seeds import UPDATE, seed_forward
from ..weights.shards import local, norm_over_processes
from .batch_loss import Share, Values, first_pass, gather
from .checks import NEEDS_CLOSURE
from .ema import EMA
from .engine_state import EngineState
from .optimizer_state import Numbers
from .setup import Setup, follow_split_groups


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
            (micro_batch,).
    """

    losses: list[Tensor]
    weight: Tensor | float
    grad_norm: Tensor | float | None
    skipped: bool = False
    metrics: list[dict[str, Tensor]] = field(default_factory=list)


class Engine(EngineState):
    """Takes optimizer steps with the model and optimizer that a strategy has wrapped. DeepSpeed has a `step` of its
    own; a pipeline takes the passes of a step in another order.

    Attributes:
        model: the model that `forward_step` calls.
        shares: of this process's micro-batches in the loss of the global batch; of the last step with a first pass.
        row: of the micro-batch whose forward pass began last, among those of all processes.
        rounds_weights: whether the first step finds other weights than the model had, because they were rounded.
    """

    rounds_weights = False
    row: int | None = None

    def __init__(self, setup: Setup, model: nn.Module, optimizer: AcceleratedOptimizer | torch.optim.Optimizer):
        self.accelerator, self.model, self.optimizer, self.plan = setup.accelerator, model, optimizer, setup.plan
        forward_step, self.batch_loss = setup.check_functions()
        self.forward_step = forward_step if setup.watched is None else setup.watched(forward_step)
        self.shares: list[Share] = []
        self.numbers = Numbers(self._own_optimizer)
        model.train()  # a pretrained model arrives in evaluation mode
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        decay = self.plan.config.ema_decay
        self.ema = EMA(self._updated_tensors(), decay, self._after_swap) if decay else None
        # Made once: a copy stalls a GPU.
        self._num_averaged = torch.tensor(float(self.plan.layout.num_averaged), device=self.accelerator.device)
        self._mean_scale = self._num_averaged / self.plan.config.batch_size

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """Takes optimizer step `number`, counted from 0, on this process's part of the global batch.

        The step uses the gradient of the mean loss over the global batch, weighted by "weight" if the
        batch has one. The number of processes and micro-batches does not change it. A step whose gradient norm is
        known and not finite leaves the weights as they were.
        """
        config, scaler = self.plan.config, self.accelerator.scaler
        scale, weight = self._loss_scale(micro_batches)
        self._first_pass(number, micro_batches)
        losses, metrics = self._backward(number, micro_batches, scale)
        weights, grad_norm = self._updated_tensors(), None
        if config.max_grad_norm or wants_norm:
            if scaler is not None:
                self.accelerator.unscale_gradients(self.optimizer)
            # Like torch's clip_grad_norm_, but accurate for large weights, and for several device meshes.
            grad_norm = self._norm()
            if config.max_grad_norm:
                gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
                clip(gradients, grad_norm, config.max_grad_norm)
        if wants_norm:
            self.trained.look(number)
        seed_forward(config.seed, number, UPDATE, self.accelerator.device)  # for an optimizer that draws
        follow_split_groups(self._own_optimizer)
        if scaler is None:  # Accelerate's wrapper only adds time to a step
            step_if_finite(self._own_optimizer, grad_norm)
        else:
            self.optimizer.step()
        for each in weights:  # as zero_grad, in a fifth of the time
            each.grad = None
        skipped = scaler is not None and getattr(self.optimizer, "step_was_skipped", False)
        if self.ema is not None and not skipped:
            self.ema.update()
        return StepResult(losses, weight, grad_norm, skipped, metrics)

    def _backward(
        self, number: int, micro_batches: Sequence[Batch], scale: Tensor
    ) -> tuple[list[Tensor], list[Values]]:
        """Accumulates the gradient of scale × the sum of the losses. Returns these and the other metrics, for each
        micro-batch, as in StepResult."""
        losses, metrics, scaler = list[Tensor](), list[Values](), self.accelerator.scaler
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self._no_sync():
                self._seed(number, index)
                values = self.forward_step(self.model, batch, number)
                loss, others = self._loss(number, index, batch, values)
                if scaler is None:
                    loss.backward(gradient=scale.to(loss))  # loss * scale takes one operation more
                else:
                    self.accelerator.backward(loss, gradient=scale.to(loss))
            losses.append(loss.detach())
            metrics.append(others)
        return losses, metrics

    def _norm(self) -> Tensor:
        """The norm of the gradient of the whole model, 0-dim, the same in all processes."""
        return norm_over_processes([weight.grad for weight in self._updated_tensors() if weight.grad is not None])

    def evaluate(self, batch: Batch, number: int) -> Values:
        """The values of `forward_step` for a batch, in each process that has it, without a gradient."""
        return self.forward_step(self.model, batch, number)

    def _loss_scale(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor | float]:
        """(1 / the weight of the global batch, which losses are multiplied by; the weight of this process's samples).
        Where a wrapper takes the mean of gradients in place of the sum, the first makes up for it."""
        plan, layout = self.plan, self.plan.layout
        if "weight" not in micro_batches[0]:
            return self._mean_scale, plan.config.batch_size / layout.data_parallel_size
        weight = torch.stack([batch["weight"].sum() for batch in micro_batches]).sum()
        # Of the processes with the same samples, the first one counts them.
        total = self.accelerator.reduce(weight * (layout.rank % layout.model_parallel_size == 0), "sum")
        # A total of 0 has losses of 0; divided by it, they would not be numbers.
        return self._num_averaged / total.where(total > 0, 1), weight

    def _first_pass(self, number: int, micro_batches: Sequence[Batch]) -> None:
        """With a `batch_loss`, finds the shares of these micro-batches in the loss of the global batch. One micro-batch
        of one process is the whole batch: one pass is enough."""
        if self.batch_loss is None or self.plan.layout.num_processes * self.plan.accumulation == 1:
            return

        def forward(index: int, batch: Batch) -> dict[str, Tensor]:
            self._seed(number, index)
            return self.evaluate(batch, number)

        values = first_pass(forward, micro_batches, len(micro_batches), self.model)
        whole = {name: gather(self.accelerator, self.plan.layout, rows) for name, rows in values.items()}
        shares = self.batch_loss.shares(whole, number)
        self.shares = [shares[self.plan.row(index)] for index in range(self.plan.accumulation)]

    def _loss(
        self, number: int, index: int, batch: Batch, values: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of weight × loss, 0-dim, and the other metrics of this process's micro-batch `index` in a step, from
        the values of `forward_step`."""
        if self.shares:
            share = self.shares[index]
            loss = weighted_sum(share.metrics["loss"], batch) + share.connection(values)
            return loss, weighted_metrics(share.metrics, batch)
        metrics = values if self.batch_loss is None else self.batch_loss(values, number)
        return weighted_sum(metrics["loss"], batch), weighted_metrics(metrics, batch)

    def _seed(self, number: int, index: int) -> None:
        """Seeds dropout for the forward pass of this process's micro-batch `index` in step `number`."""
        self.row = self.plan.row(index)
        seed_forward(self.plan.config.seed, number, self.row, self.accelerator.device)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Accumulates gradients in each process, without a sum over the replicas of the model.

        FSDP2 nevertheless sums those of each micro-batch over its shards: otherwise every process would hold the
        gradients of the whole model."""
        sum_over_replicas = getattr(self.model, "set_requires_all_reduce", None)  # of FSDP2
        if sum_over_replicas is None:
            with self.accelerator.no_sync(self.model):
                yield
        else:
            sum_over_replicas(False)
            yield
            sum_over_replicas(True)

    def set_learning_rate(self, factor: float) -> float:
        """Sets the learning rate of each parameter group to its peak × factor; returns the first group's rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor  # of a group that the recipe added, too
        return self.optimizer.param_groups[0]["lr"]


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


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor | float | None) -> None:
    """Takes a step of an optimizer, unless the norm of the gradient is known and not finite.

    To read the norm would stall a GPU. There fused kernels look at it, as torch's loss scaler lets them; another
    optimizer takes the step, and the run ends a step later.
    """
    is_read = not isinstance(grad_norm, Tensor) or grad_norm.device.type == "cpu"
    if grad_norm is None or (is_read and math.isfinite(grad_norm)):
        _step(optimizer)
    elif not is_read:
        looks: Any = optimizer if optimizer.defaults.get("fused") else None
        if looks is not None:
            looks.grad_scale, looks.found_inf = None, 1 - torch.as_tensor(grad_norm).isfinite().float()
        _step(optimizer)
        if looks is not None:
            del looks.grad_scale, looks.found_inf


def _step(optimizer: torch.optim.Optimizer) -> None:
    """A step of an optimizer. Raises UsageError if it fails because it needs a closure, or gradients that are dense, or
    sparse."""
    sparse = [weight for group in optimizer.param_groups for weight in group["params"] if _has_sparse_gradient(weight)]
    if sparse and type(optimizer) is torch.optim.SGD:  # its fused kernel takes none
        for group in optimizer.param_groups:
            group["fused"] = False
    try:
        optimizer.step()
    except Exception as error:
        name = type(optimizer).__name__
        lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
        if any("closure" in line for line in lines):
            raise UsageError(f"{name} {NEEDS_CLOSURE}", f"use another optimizer ({line_of(error)})") from None
        if "does not support dense gradients" in str(error):  # SparseAdam, also where a table's gradient is divided
            raise UsageError(
                f"{name} takes sparse gradients alone ({line_of(error)})",
                "use torch.optim.Adam, or --config_file accelerate_configs/ddp.yaml for a table with sparse=True",
            ) from None
        if sparse:
            raise UsageError(
                f"{name} takes no sparse gradients ({line_of(error)}): use sparse=False in the constructor of the "
                "embedding, or use torch.optim.SGD, Adagrad or SparseAdam"
            ) from None
        raise


def _has_sparse_gradient(weight: Tensor) -> bool:
    return weight.grad is not None and weight.grad.is_sparse


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
