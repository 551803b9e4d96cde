"""Optimizer steps of a single process, DDP, FSDP2 and tensor parallelism."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.batches import Batch
from ..norms import clip
from .engine import Engine, StepResult
from .parts import local, norm_over_processes


class AccelerateEngine(Engine):
    """Steps with the model and optimizer that Accelerate prepared."""

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        scale, weight = self._loss_scale(micro_batches)
        self._first_pass(number, micro_batches)
        losses, metrics = [], []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self._no_sync():
                loss, others = self._forward(number, index, batch)
                self._backward(loss, scale.to(loss))
            losses.append(loss.detach())
            metrics.append(others)
        grad_norm = self._clip() if self.plan.config.max_grad_norm or wants_norm else None
        skipped = self._update(number, grad_norm)
        return StepResult(losses, weight, grad_norm, skipped, metrics)

    def _backward(self, loss: Tensor, scale: Tensor) -> None:
        """Adds the gradient of scale × loss to the weights' gradients; loss * scale takes one operation more."""
        if self.accelerator.scaler is None:
            loss.backward(gradient=scale)  # accelerator.backward adds a division by 1
        else:
            self.accelerator.backward(loss, gradient=scale)

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

    def _clip(self) -> Tensor:
        """Clips the gradient of the whole model to `--max_grad_norm`, unless that is 0; returns the norm before.

        Like torch's `clip_grad_norm_`, but accurate for large weights, and for several device meshes.
        """
        self.accelerator.unscale_gradients(self.optimizer)
        gradients = [weight.grad for weight in self._updated_tensors() if weight.grad is not None]
        norm = norm_over_processes(gradients)
        if max_norm := self.plan.config.max_grad_norm:
            clip([local(gradient) for gradient in gradients], norm, max_norm)
        return norm

    @property
    def module(self) -> nn.Module:
        # Not accelerator.unwrap_model: it imports deepspeed if installed, which takes seconds.
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
