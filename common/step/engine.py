"""Takes optimizer steps, `Engine.step`, and holds their state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.sets import Batch
from ..errors import UsageError
from ..norms import clip
from ..seeds import UPDATE, generator_states, seed_forward
from ..weights.shards import Shard, TensorReader, checkpoint_tensors, local, norm_over_processes, shards_of, whole
from .batch_loss import SAMPLE_WEIGHT, Share, Values, gather, put
from .ema import EMA
from .optimizer import choose_fused_kernels, follow_split_groups, step_if_finite
from .optimizer_state import Numbers, as_tensor, load_optimizer
from .replicas import Replicas
from .setup import Setup
from .trained import Trained
from .values import weighted

LossesAndMetrics = tuple[list[Tensor], list[Values]]  # of each micro-batch, as in StepResult


@dataclass
class StepResult:
    """The result of one optimizer step in this process. Tensors stay on the device: reading them would stall it."""

    losses: list[Tensor]  # for each micro-batch, the sum of weight × loss over this process's samples, 0-dim
    weight: Tensor | float  # sum of the weights of this process's samples; their number if a batch has no "weight"
    grad_norm: Tensor | float | None  # L2, of the whole model for the global batch, before clipping; None: not needed
    skipped: bool = False  # whether the loss scaler found an overflow and left the weights unchanged
    # for each micro-batch, the other metrics of `forward_step`, each times the sample's weight, of shape (micro_batch,)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)


class Engine:
    """Takes optimizer steps with the model and optimizer that a strategy has wrapped, and gives checkpoints and exports
    their state. DeepSpeed updates the weights by itself; a pipeline takes the passes of a step in a different order."""

    row: int | None = None  # of the micro-batch whose forward pass began last, counted over all processes

    def __init__(
        self, setup: Setup, model: nn.Module, optimizer: AcceleratedOptimizer | torch.optim.Optimizer | None = None
    ):
        if optimizer is None:
            optimizer = setup.accelerator.prepare_optimizer(setup.optimizer)
        self.setup, self.accelerator, self.plan = setup, setup.accelerator, setup.plan
        self.model, self.optimizer = model, optimizer  # as the strategy and Accelerate wrapped them
        self.device = setup.accelerator.device
        choose_fused_kernels(setup.accelerator, self._own_optimizer)
        forward_step, self.batch_loss = setup.check_functions(model)
        self.forward_step = forward_step if setup.watched is None else setup.watched(forward_step)
        layout = self.plan.layout
        self._divides = layout.dp_shard * layout.tp * layout.pp * layout.ep > 1  # whether the layout divides weights
        self.shares: list[Share] = []  # of this process's micro-batches, of the last step with a first pass
        # Called in each step when the gradients are complete, before anything reads or clips them.
        self.after_backward: list[Callable[[], None]] = []
        self.numbers = Numbers(self._own_optimizer)
        self.replicas = Replicas(setup, self.saved_tensors, self.holders)
        self.trained = Trained(self.accelerator, optimizer, self.saved_tensors)
        model.train()  # a pretrained model arrives in evaluation mode
        decay = self.plan.config.ema_decay
        self.ema = EMA(self._updated_tensors(), decay, self._after_swap) if decay else None
        # Made once: a copy stalls a GPU.
        self._num_averaged = torch.tensor(float(layout.num_averaged), device=self.device)
        self._mean_scale = self._num_averaged / self.plan.config.batch_size

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        """Takes optimizer step `number`, counted from 0, on this process's part of the global batch.

        The step uses the gradient of the mean loss over the global batch, weighted by "weight" if the
        batch has one. The number of processes and micro-batches does not change it. A step whose gradient norm is
        known and not finite leaves the weights as they were.
        """
        scale, weight = self._loss_scale(micro_batches)
        self._first_pass(number, micro_batches)
        losses, metrics = self._backward(number, micro_batches, scale)
        for look in self.after_backward:
            look()
        grad_norm, skipped = self._update(number, wants_norm)
        if self.ema is not None and not skipped:
            self.ema.update()
        return StepResult(losses, weight, grad_norm, skipped, metrics)

    def _backward(self, number: int, micro_batches: Sequence[Batch], scale: Tensor) -> LossesAndMetrics:
        """Accumulates the gradient of scale × the sum of the losses."""
        losses, metrics = list[Tensor](), list[Values]()
        for index, batch in enumerate(micro_batches):
            with self._sums_gradients(index == len(micro_batches) - 1):
                self._seed(number, index)
                loss, others = self._loss(number, index, batch, self.forward_step(self.model, batch, number))
                self._differentiate(loss, scale)
            losses.append(loss.detach())
            metrics.append(others)
        return losses, metrics

    def _differentiate(self, loss: Tensor, scale: Tensor) -> None:
        backward = loss.backward if self.accelerator.scaler is None else partial(self.accelerator.backward, loss)
        for module in self._gathered:  # not before: a backward pass of forward_step's own leaves weights for this one
            module.set_reshard_after_backward(True, recurse=False)
        backward(gradient=scale.to(loss))  # loss * scale would take one more operation
        for module in self._gathered:
            module.set_reshard_after_backward(False, recurse=False)
            module.reshard()

    @cached_property
    def _gathered(self) -> list[Any]:
        """The modules whose weights FSDP2 gathers."""
        return [module for module in self.model.modules() if hasattr(module, "set_reshard_after_backward")]

    def _update(self, number: int, wants_norm: bool) -> tuple[Tensor | float | None, bool]:
        """Clips and takes the optimizer's step. Returns (the gradient's norm, if asked; whether it was skipped)."""
        config, scaler = self.plan.config, self.accelerator.scaler
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
            self.trained.look()
        follow_split_groups(self._own_optimizer)
        with self._draws_for_all_weights(number):
            if scaler is None:  # Accelerate's wrapper only adds time to a step
                step_if_finite(self._own_optimizer, grad_norm)
            else:
                self.optimizer.step()
        for each in weights:  # like zero_grad, in a fifth of the time
            each.grad = None
        return grad_norm, scaler is not None and getattr(self.optimizer, "step_was_skipped", False)

    @contextmanager
    def _draws_for_all_weights(self, number: int) -> Iterator[None]:
        """Seeds an optimizer that draws random numbers. Raises UsageError if it draws for some of the weights."""
        seed_forward(self.plan.config.seed, number, UPDATE, self.device)
        before = generator_states(self.device) if self._divides else None
        yield
        if before is not None and generator_states(self.device) != before:
            what = f"a hook of its step, draws random numbers in step {number + 1}, and {self.plan.layout} divides"
            raise UsageError(f"the optimizer, or {what} the weights: use --config_file accelerate_configs/ddp.yaml")

    def _norm(self) -> Tensor:
        """The norm of the gradient of the whole model, 0-dim, the same in all processes."""
        return norm_over_processes([weight.grad for weight in self._updated_tensors() if weight.grad is not None])

    def evaluate(self, batch: Batch, number: int) -> Values:
        """The values of `forward_step` for a batch, without a gradient; none in a process without the last stage."""
        return self.forward_step(self.model, batch, number)

    def share_values(self, values: Values) -> Values:
        """The values of `evaluate`, for one batch or several, in all processes with the same samples."""
        return dict(self._of_all_stages(values))

    def _loss_scale(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor | float]:
        """(1 / the weight of the global batch, which losses are multiplied by; the weight of this process's samples).
        If a wrapper averages gradients instead of summing them, the first compensates for it."""
        plan, layout = self.plan, self.plan.layout
        if "weight" not in micro_batches[0]:
            return self._mean_scale, plan.config.batch_size / layout.data_parallel_size
        weight = torch.stack([batch["weight"].sum() for batch in micro_batches]).sum()
        # Among processes with the same samples, the first one counts them.
        total = self.accelerator.reduce(weight * (layout.rank % layout.model_parallel_size == 0), "sum")
        # With a total of 0 the losses are 0; divided by it, they would be NaN.
        return self._num_averaged / total.where(total > 0, 1), weight

    def _first_pass(self, number: int, micro_batches: Sequence[Batch]) -> None:
        """With a `batch_loss`, finds the shares of these micro-batches in the loss of the global batch. One micro-batch
        of one process is the whole batch: one pass is enough. Restores the buffers, such as BatchNorm's: the second
        pass changes them again."""
        if self.batch_loss is None or self.plan.layout.num_processes * self.plan.accumulation == 1:
            return
        rows: Values = {}
        with torch.no_grad(), buffers_kept(self.model):
            for index, batch in enumerate(micro_batches):
                weight = {SAMPLE_WEIGHT: batch["weight"]} if "weight" in batch else {}
                self._seed(number, index)
                put(rows, index, len(micro_batches), self.evaluate(batch, number) | weight)
        values = self.share_values(rows)
        whole = {name: gather(self.accelerator, self.plan.layout, own) for name, own in values.items()}
        shares = self.batch_loss.shares(whole, number)
        self.shares = [shares[self.plan.row(index)] for index in range(self.plan.accumulation)]

    def _loss(self, number: int, index: int, batch: Batch, values: Values) -> tuple[Tensor, Values]:
        """(the sum of weight × loss, 0-dim; the other metrics) of micro-batch `index`, from `forward_step`'s values."""
        if self.shares:
            loss, metrics = weighted(self.shares[index].metrics, batch)
            return loss + self.shares[index].connection(values), metrics
        return weighted(values if self.batch_loss is None else self.batch_loss(values, number), batch)

    def _seed(self, number: int, index: int) -> None:
        """Seeds dropout for the forward pass of this process's micro-batch `index` in step `number`."""
        self.row = self.plan.row(index)
        seed_forward(self.plan.config.seed, number, self.row, self.device)

    def _sums_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch's passes: after the last one of a step, gradients are summed over the replicas.
        FSDP2 sums over its shards each time, or a process would hold the gradients of the whole model."""
        if sum_over_replicas := getattr(self.model, "set_requires_all_reduce", None):  # of FSDP2
            sum_over_replicas(is_last)
            return nullcontext()
        return nullcontext() if is_last else self.accelerator.no_sync(self.model)

    def set_learning_rate(self, factor: float) -> float:
        """Sets the learning rate of each parameter group to its peak × factor; returns the first group's rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor  # also in a group that the recipe added
        return self.optimizer.param_groups[0]["lr"]

    @property
    def module(self) -> nn.Module:
        """The recipe's own module, without the wrappers of the parallelism."""
        # Not accelerator.unwrap_model: it imports deepspeed if installed, which takes seconds.
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def running_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """(name in the recipe's module, module) of what this process runs."""
        return self.module.named_modules()

    @cached_property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the recipe made, without wrappers."""
        wrapped = self.optimizer
        return wrapped.optimizer if isinstance(wrapped, AcceleratedOptimizer) else wrapped

    def _updated_tensors(self) -> list[Tensor]:
        """The weights, or shards of weights, that this process's optimizer updates."""
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _after_swap(self) -> None:
        """Copies the weights that the averages have replaced to where passes read them, if that is elsewhere."""

    def ema_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the moving averages as its weights; a no-op without `--ema_decay`."""
        return nullcontext() if self.ema is None else self.ema.swap_in()

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds as JSON, besides the tensors."""
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
        """This process's shards of `model.<name>`, `optimizer.<name>.<slot>` and perhaps `average.<name>`."""
        averages = {} if self.ema is None else self.ema.averages
        shards: list[Shard] = []
        for name, tensor in self.saved_tensors().items():
            holders = self.holders(name)
            # Buffers may differ between processes: DDP uses the first process's.
            shards += shards_of(f"model.{name}", tensor, holders, of_first=not isinstance(tensor, nn.Parameter))
            for slot, value in self._own_optimizer.state.get(tensor, {}).items():
                if value is not None:
                    state = as_tensor(self._own_optimizer, slot, value)
                    shards += shards_of(f"optimizer.{name}.{slot}", state, holders)
            if tensor in averages:
                shards += shards_of(f"average.{name}", averages[tensor], holders)
        return shards

    def holders(self, name: str) -> Sequence[int]:
        """Ranks of the processes that hold a saved tensor, or shards of it."""
        return range(self.plan.layout.num_processes)

    def load_parts(self, reader: TensorReader) -> None:
        """Restores the optimizer state and the moving averages. The weights were loaded before `prepare`."""
        load_optimizer(self._own_optimizer, self.saved_tensors(), reader)
        if self.ema is not None:
            self.ema.load(self.saved_tensors(), reader)

    def each_whole(self, tensors: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor), whole in the main process, one at a time. A collective: all processes must call it and
        take all. `tensors`: divided like the weights of these names; None: the weights and saved buffers."""
        for name, tensor in self._of_all_stages(self.saved_tensors() if tensors is None else tensors):
            yield name, self._whole(tensor).detach()

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor) of all processes that share the layers of a model, one at a time, in each of them."""
        return tensors.items()

    def _whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)


@contextmanager
@torch.no_grad()
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """After the `with` block the model has the same buffers, with the same values."""
    buffers = [(layer, name, each) for layer in model.modules() for name, each in layer._buffers.items()]
    kept = [(layer, name, each, each.clone()) for layer, name, each in buffers if each is not None]
    yield
    for layer, name, buffer, value in kept:
        layer._buffers[name] = buffer.copy_(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode for the `with` block. In it both `model.generate` and `model.module.generate`
    work, if either does: DDP has the second, a bare model the first."""
    inner = getattr(model, "module", model)
    reached: dict[str, Any] = {} if hasattr(model, "module") or not hasattr(model, "generate") else {"module": model}
    if not hasattr(model, "generate") and hasattr(inner, "generate"):
        reached = {"generate": inner.generate}
    _set_training(model, False)
    vars(model).update(reached)
    try:
        yield
    finally:
        for name in reached:
            del vars(model)[name]
        # FSDP2 keeps the gathered weights of the outermost module for a backward pass: what code writes would be lost.
        for module in model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()
        _set_training(model, True)


def _set_training(model: nn.Module, training: bool) -> None:
    model.train(training)
    model.training = training  # a wrapper may forward train() without setting its own flag
